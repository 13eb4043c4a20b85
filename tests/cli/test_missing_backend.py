"""Where the backend that Keras would have is not installed, the only other one is used, or those there are named.

Here backends are hidden from a process; in tests/test_clean_environments.py they are not there.
"""

from __future__ import annotations

import pytest
from cases import few
from engines.fresh_process import run

MODULE = """
import keras

def make():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")])
"""
LATE = """
def make():
    import keras
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")])
"""
NEEDS_MORE = "import tensorflow\n"
COMMAND = """
import sys
sys.modules.update(dict.fromkeys({hidden}))
from layoutmap.cli.main import main
sys.exit(main({arguments}))
"""
PLAIN = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"net": MODULE, "late": LATE, "more": NEEDS_MORE + MODULE}.items():
        (tmp_path / f"{name}.py").write_text(text)


def command(arguments, hidden, backend=None):
    """The command's exit code, and what it says on stderr."""
    text = COMMAND.format(arguments=[*arguments, "--mesh", "x=2"], hidden=hidden)
    done = run(text, {**PLAIN, "KERAS_BACKEND": backend})
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "backend", "hidden", "expected"),
    [
        (
            ["plan", "net:make"],
            None,
            ["tensorflow"],
            """\
layoutmap: Keras cannot be imported: its backend, tensorflow, is not installed
  installed  jax, torch
  why        KERAS_BACKEND is not set, and then Keras chooses by itself
  fix        add --backend jax, or pip install "layoutmap[tensorflow]"
""",
        ),
        (
            ["lint", "late:make", "--library", "keras"],
            "torch",
            ["torch"],
            """\
layoutmap: Keras cannot be imported: its backend, torch, is not installed
  installed  jax, tensorflow
  why        KERAS_BACKEND=torch
  fix        add --backend jax, or pip install "layoutmap[torch]"
""",
        ),
        (
            ["explain", "net:make", "up.kernel", "--backend", "jax"],
            "torch",
            ["jax", "tensorflow", "torch"],
            """\
layoutmap: Keras cannot be imported: its backend, jax, is not installed
  installed  none of jax, tensorflow, torch
  why        KERAS_BACKEND=jax
  fix        pip install "layoutmap[jax]"
""",
        ),
    ],
)
def test_the_command_says_which_backends_there_are(arguments, backend, hidden, expected):
    """And how to choose one; no traceback of Keras."""
    code, said = command(arguments, hidden, backend)

    assert 2 == code
    assert expected == said[said.index("layoutmap: Keras") :]
    assert "Traceback" not in said


@pytest.mark.parametrize("name", few(["net:make", "late:make"], "late:make"))
def test_the_only_backend_is_used(name):
    """Without `KERAS_BACKEND`, although Keras's own choice is another one."""
    code, said = command(["plan", name, "--library", "keras"], ["tensorflow", "torch"])

    assert 0 == code, said


def test_the_library_uses_the_only_backend():
    """In Python, too, where Keras is not imported yet."""
    text = (
        "import sys; sys.modules.update(tensorflow=None, torch=None)\n"
        f"import layoutmap as lm\n{LATE}\nprint(lm.plan(make, lm.LayoutMap('x=2'), library='keras').verdict)"
    )
    done = run(text, {**PLAIN, "KERAS_BACKEND": None})

    assert 0 == done.returncode, done.stderr


def test_another_import_that_fails_keeps_its_traceback():
    """A model's own import of a framework that is not there is no matter of Keras's backend."""
    code, said = command(["plan", "more:make"], ["tensorflow"])

    assert 2 == code
    assert 'more.py", line 1, in <module>' in said
    assert "layoutmap: more:make raised ModuleNotFoundError" in said


def test_the_library_says_it_in_python():
    """What to write, and where."""
    text = (
        "import sys; sys.modules.update(tensorflow=None)\n"
        "import layoutmap as lm; lm.plan(lambda: None, lm.LayoutMap('x=2'), library='keras')"
    )
    done = run(text, {**PLAIN, "KERAS_BACKEND": None})

    assert 1 == done.returncode
    assert done.stderr.endswith("""\
ScopeError: Keras cannot be imported: its backend, tensorflow, is not installed
  installed  jax, torch
  why        KERAS_BACKEND is not set, and then Keras chooses by itself
  fix        start Python anew, and write os.environ["KERAS_BACKEND"] = "jax" before Keras is imported, \
or pip install "layoutmap[tensorflow]"
""")
