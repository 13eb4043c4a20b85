"""Record how tensors are initialized, and replay that for some indices only, bit for bit.

tape           records a program's operations; `calls` inspects them, `interception` sends them and other events to it
steps          the records: operations, and views of memory that is not allocated
recipes        how to compute one tensor: `replay` all of it, or compute some indices in one pass
elementwise    whether one pass is enough; `operations` lists the operations that need few elements at a time
readers, spans compute elements from the first to the last, some at a time, in the order that `passes` sets
streams, tiles random numbers in pieces: of torch's one stream (`jump` moves ahead in it), or by tiles
"""

from layoutmap.engines.torch.deferred_init.fake_tensors import UNSUPPORTED_ERRORS as UNSUPPORTED_ERRORS
from layoutmap.engines.torch.deferred_init.fake_tensors import FakeTensor as FakeTensor
from layoutmap.engines.torch.deferred_init.fake_tensors import FakeTensorMode as FakeTensorMode
from layoutmap.engines.torch.deferred_init.fake_tensors import (
    unset_fake_temporarily as unset_fake_temporarily,
)
from layoutmap.engines.torch.deferred_init.streams import free_scratch_buffer as free_scratch_buffer
from layoutmap.engines.torch.deferred_init.tape import Tape as Tape
from layoutmap.engines.torch.deferred_init.tape import trace_recipe as trace_recipe
