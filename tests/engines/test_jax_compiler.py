"""XLA's compiler in a process of its own: what it says of a step, and that nothing is left of it however it ends."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from cases import compiled_for_gpus

from layoutmap.core.errors import EngineError
from layoutmap.cost.jax import compiled, compiler
from layoutmap.cost.jax.compiled import compile_modules
from layoutmap.cost.jax.compiler_process import NO_DEVICES
from layoutmap.cost.jax.hlo import CompiledCollective, count_compiled_collectives
from layoutmap.cost.jax.targets import TARGETS
from layoutmap.cost.machines import load_built_in_devices
from layoutmap.cost.verified import StepTooLargeError

MODULE = b"module @step { func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> { return %x : tensor<8xf32> } }"
NO_MEMORY = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."
TPU = """\
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%start (p: bf16[128,256]) -> (bf16[128,256], bf16[1024,256]) {
  %all-gather.1 = bf16[1024,256]{1,0:T(8,128)(2,1)} all-gather(%p), replica_groups=mesh['x'=8] {'x'}, x={chain_id="0"}
  ROOT %c = (bf16[128,256]{1,0}, bf16[1024,256]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p: bf16[128,256]) -> bf16[1024,256] {
  %all-gather.2 = bf16[1024,256]{1,0:T(8,128)S(1)} all-gather(%p), replica_groups=mesh['x'=8] {'x'}, x={chain_id="0"}
}

%all-reduce-scatter.3 (p: f32[256,1024]) -> f32[32,1024] {
  %all-reduce.1 = f32[256,1024]{1,0:T(8,128)} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, x=1
}

%body (p: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {
  %two = s32[]{:T(128)} constant(2)
  %i.2 = s32[]{:T(128)S(6)} add(%i, %two), backend_config={}
  %s = (bf16[128,256]{1,0}, bf16[128,256]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%q), channel_id=9
  %f.1 = (bf16[128,256]{1,0}, bf16[1024,256]{1,0}) fusion(%q), kind=kCustom, calls=%start, backend_config={}
  %f.2 = bf16[1024,256]{1,0} fusion(%f.1), kind=kCustom, calls=%async_collective_fusion.2, backend_config={}
  ROOT %out = (s32[]{:T(128)}, bf16[128,256]{1,0}) tuple(%i.2, %q)
}

%condition (p: (s32[], bf16[128,256])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0, metadata={}
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main.4_spmd (p: bf16[128,256]) -> f32[32,1024] {
  %w = (s32[]{:T(128)}, bf16[128,256]{1,0:T(8,128)(2,1)}) while(%t), condition=%condition, body=%body
  %r = f32[32,1024]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.3, backend_config={"x":1}
  %a = (f32[256,512]{1,0:T(8,128)}, f32[]{:T(128)}) all-reduce(%b, %c), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0)
}
"""


def test_collectives_in_fusions_of_tpus_are_found():
    """One in parts counts once for each turn, loops may count by two, and an all-reduce may be a reduce-scatter."""
    assert {
        CompiledCollective("all_gather", 8, 1024 * 256 * 2): 3,
        CompiledCollective("permute", 2, 128 * 256 * 2): 3,
        CompiledCollective("reduce_scatter", 8, 256 * 1024 * 4): 1,
        CompiledCollective("all_reduce", 4, 256 * 512 * 4): 1,
        CompiledCollective("all_reduce", 4, 4): 1,
    } == dict(count_compiled_collectives(TPU))


def test_each_machine_has_a_compiler():
    """`verify=True` compiles for the devices that have a name."""
    assert set() == set(load_built_in_devices()) - set(TARGETS)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 12, 17, 60, 8960])
def test_slices_of_tpus_have_as_many_as_the_mesh(number):
    """Whatever the number is, the sides of the slice make it."""
    for name in ("v5e", "v5p"):
        *sides, size = 1, 1, 1, *TARGETS[name].choose_tpu_slice_sides(number)
        for side in sides:
            size *= side
        assert number == size


@pytest.mark.parametrize(
    ("target", "what", "fix"),
    [
        ("b300", "target 'b300' is not known", 'verify="h100"'),
        ("v5p", "XLA's compiler for 'v5p' is not installed", 'pip install "layoutmap[xla-tpu]"'),
        ("h100", "XLA's compiler for 'h100' is not installed", 'pip install "layoutmap[xla-gpu]"'),
    ],
)
def test_a_compiler_that_is_not_there(target, what, fix, monkeypatch):
    """The error names the target, and what installs its compiler; nothing is started for it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineError) as error:
        compile_modules([MODULE], 8, target)
    assert (True, True) == (what in str(error.value), fix in str(error.value))


def _children():
    return {pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text().split()}


@pytest.fixture
def _nothing_is_left(tmp_path, monkeypatch):
    """What a test compiles leaves no process and no file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = _children()
    yield
    assert (before, []) == (_children(), list(tmp_path.iterdir()))


@pytest.mark.usefixtures("_nothing_is_left")
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_or_a_timeout_ends_the_compiler(error):
    """An exception of a signal, at any moment, reaches the caller, and the process of the compiler ends."""

    def stop(*_):
        raise error

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)  # while it starts
    try:
        with pytest.raises(error):
            compile_modules([MODULE], 1, "cpu")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_nothing_is_left")
def test_a_compiler_that_is_ended_from_outside_is_an_error():
    """As the system does where memory is short: the error names the signal."""
    before = _children()

    def kill():
        for pid in _children() - before:
            os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(EngineError, match="XLA's compiler for 'cpu' was ended by SIGKILL"):
        compile_modules([MODULE], 1, "cpu", kill)


@pytest.mark.long  # a process of JAX's
@pytest.mark.usefixtures("_nothing_is_left")
def test_a_plugin_that_is_no_plugin_is_an_error(tmp_path_factory, monkeypatch):
    """A library that cannot be loaded: the error says what JAX says of it, and how to install another one."""
    folder = tmp_path_factory.mktemp("plugins")
    package = folder / "libtpu"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"def get_library_path():\n    return {str(package / 'libtpu.so')!r}\n"
    )
    (package / "libtpu.so").write_text("no library")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # a libtpu that JAX has found in this process
    with pytest.raises(EngineError, match=r"(?s)'v5e' does not work.*libtpu.so.*layoutmap\[xla-tpu\]"):
        compile_modules([MODULE], 4, "v5e")


@pytest.mark.long  # a process of JAX's
@pytest.mark.usefixtures("_nothing_is_left")
def test_what_xla_refuses_is_an_error_with_its_words():
    """A module that is none: the error says what XLA said, in a line, and with which versions."""
    with pytest.raises(
        EngineError, match=r"(?s)did not compile the step for 'cpu'.*said.*Unable to parse.*jaxlib"
    ):
        compile_modules([b"module {"], 1, "cpu")


@pytest.mark.long  # a process of JAX's
@pytest.mark.parametrize("target", [compiled_for_gpus("h100")])
def test_what_is_printed_before_code_is_made_is_what_xla_says_of_the_whole(target, monkeypatch):
    """Arguments, peak and collectives of the print are those of the executable, which takes several times as long."""
    module = b"""module @step attributes {mhlo.num_partitions = 8 : i32} {
        sdy.mesh @mesh = <["x"=8]>
        func.func public @main(%x: tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>,
                                                      tf.aliasing_output = 0 : i32},
                               %w: tensor<64x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>})
            -> (tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, tensor<32x16xf32>) {
          %y = stablehlo.add %x, %x : tensor<64x32xf32>
          %z = stablehlo.dot_general %y, %w, contracting_dims = [0] x [0]
              : (tensor<64x32xf32>, tensor<64x16xf32>) -> tensor<32x16xf32>
          return %y, %z : tensor<64x32xf32>, tensor<32x16xf32>
        } }"""
    printed = compile_modules([module], 8, target)[0]
    environment = compiler.make_compiler_environment(TARGETS[target], 8)
    plain = environment | {"XLA_FLAGS": environment["XLA_FLAGS"].partition(" --xla_dump")[0]}
    monkeypatch.setattr(compiled, "make_compiler_environment", lambda *args: plain)
    whole = compile_modules([module], 8, target)[0]
    assert (printed.argument_bytes, printed.peak_bytes) == (whole.argument_bytes, whole.peak_bytes)
    assert printed.collectives == whole.collectives
    assert {"all_reduce"} == {each.kind for each in whole.collectives}


def test_the_compiler_ends_with_the_process_that_started_it():
    """Where that is killed, which no code can see, too."""
    program = textwrap.dedent("""
        from layoutmap.cost.jax.compiled import compile_modules
        kind = "tensor<64x64xf32>"
        product = f"contracting_dims = [1] x [0] : ({kind}, {kind}) -> {kind}"
        lines = [f"%v{n + 1} = stablehlo.dot_general %v{n}, %v{n}, {product}" for n in range(100_000)]  # minutes
        body = "\\n".join([*lines, f"return %v{len(lines)} : {kind}"])
        text = f"module @step {{ func.func public @main(%v0: {kind}) -> {kind} {{ {body} }} }}"
        compile_modules([text.encode()], 1, "cpu", lambda: print("waits", flush=True))
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert b"waits\n" == process.stdout.readline()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    end = time.monotonic() + 240
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("code", "said", "what"),
    [
        (1, "Fatal\njax.errors.JaxRuntimeError: INTERNAL: no", "XLA did not compile the step for 'v5e'"),
        (-signal.SIGSEGV, "", "XLA's compiler for 'v5e' does not work"),
        (NO_DEVICES, "RuntimeError: JAX TPU support not installed", "XLA's compiler for 'v5e' does not work"),
        (1, f"JaxRuntimeError: {NO_MEMORY}", "the step does not fit the memory of 'v5e'"),
    ],
)
def test_what_a_compiler_says_in_its_end(code, said, what):
    """A crash, a step that is too large, and a refusal are told apart."""
    assert what in str(compiled._make_compile_error("v5e", TARGETS["v5e"], code, said))


def test_a_step_that_is_too_large_has_what_it_needs():
    """XLA for TPUs says it in GiB."""
    error = compiled._make_compile_error("v5e", TARGETS["v5e"], 1, f"JaxRuntimeError: {NO_MEMORY}")
    assert isinstance(error, StepTooLargeError)
    assert 20.5 * 2**30 == error.peak_bytes
