"""Record how tensors are initialized, and replay that for some indices only, bit for bit.

tape           records a program's operations; asks `calls` what a call says, and `interception` what else it must see
steps          what is written down: views of memory that does not exist, and operations
recipes        the way to the values of one tensor: `replay` all of it, or one pass over some indices
elementwise    which histories can be made in one pass; `operations` knows what each operation looks at
readers, runs  elements from the first to the last, some at a time, in the order that `passes` sets
streams, tiles random numbers in pieces: of torch's one stream (`jump` moves ahead in it), or by tiles
"""

from layoutmap.engines.torch.deferred_init.fake_tensors import UNSUPPORTED_ERRORS as UNSUPPORTED_ERRORS
from layoutmap.engines.torch.deferred_init.fake_tensors import FakeTensor as FakeTensor
from layoutmap.engines.torch.deferred_init.fake_tensors import FakeTensorMode as FakeTensorMode
from layoutmap.engines.torch.deferred_init.streams import free_scratch_buffer as free_scratch_buffer
from layoutmap.engines.torch.deferred_init.tape import Tape as Tape
from layoutmap.engines.torch.deferred_init.tape import trace as trace
