"""Bad input to each command: exit code 2, nothing on stdout, a message that names the fix, no traceback of ours."""

import os
import subprocess
import sys

import pytest

import layoutmap as lm
from layoutmap.cli.main import main
from layoutmap.core.escaping import escape_text
from layoutmap.core.variables import VariableSpec
from layoutmap.scope.plan import make_plan

PLAN = make_plan(
    [VariableSpec("up.kernel", (8, 8), "float32")],
    lm.LayoutMap(lm.Mesh(None, "model=4"), {".*": ("model", None)}),
)
MODULE = """
def make():
    raise AssertionError("never called: no model library is imported")

def make_of_size(size):
    return size

three = 3
"""
FILES = {
    "plan.json": PLAN.to_json().encode(),
    "latin.json": "größe".encode("latin1"),
    "utf16.json": PLAN.to_json().encode("utf-16"),
    "deep.json": b"[" * 200_000,
    "empty.json": b"",
    "list.json": b"[1]",
    "other.json": b'{"format": "other"}',
    "latin.yaml": "version: 1\nrules: {größe: []}".encode("latin1"),
    "deep.yaml": b"[" * 600,
    "list.yaml": b"- 1",
    "mm.py": MODULE.encode(),
    "syntax.py": b"def make(:",
    "latin_py.py": "x = 'größe'".encode("latin1"),
    "exits.py": b"import sys\nsys.exit(0)",
    "exits_plainly.py": b"raise SystemExit",
    "exits_late.py": b"import atexit, sys\natexit.register(sys.exit, 0)\nsys.exit()",
    "exits_in_getattr.py": b"def __getattr__(name):\n    raise SystemExit(0)",
    "parses.py": b"import argparse\nargparse.ArgumentParser().parse_args(['x'])",
    "raises.py": b"def f():\n    raise KeyError('\\x1b[31mred')\n\nf()",
    "raises_os.py": b"open('no such file')",
    "raises_base.py": b"class Stop(BaseException): pass\nraise Stop",
    "recurses.py": b"def f():\n    f()\n\nf()",
    "imports.py": b"import no_such_inner",
    "moves.py": b"import os\nos.chdir('/')\nraise ValueError('moved')",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder.json").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "mm.py").write_text(MODULE)
    return folder


@pytest.fixture(autouse=True)
def folder(files, monkeypatch):
    monkeypatch.chdir(files)
    path = list(sys.path)
    yield files
    assert path == sys.path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


# What is named in the place of a model, and a part of the answer that shows what to do.
NAMES = {
    "latin.json": "save the file as UTF-8",
    "utf16.json": "not UTF-8 text: byte 0 is 0xff",
    "deep.json": "deep.json: ",
    "empty.json": "empty.json: ",
    "list.json": "list.json: ",
    "other.json": "other.json: ",
    "missing.json": "name a file that exists",
    "folder.json": "Is a directory",
    "zero\0byte.json": "name a file that exists",
    "mm": "layoutmap plan mm:make_model",
    "mm:": "layoutmap plan mm:make_model",
    ":make": "layoutmap plan my_models:make",
    "": "layoutmap plan my_models:make_model",
    "./mm:make": "layoutmap plan mm:make",
    "mm.py:make": "layoutmap plan mm:make",
    "./sub/mm.py:make": "layoutmap plan sub.mm:make",
    "sub/mm:make": "layoutmap plan sub.mm:make",
    "../mm:make": "layoutmap plan my_models:make",
    "/mm.py:make": "layoutmap plan my_models:make",
    ".mm:make": "a model is named as package.module:function",
    "sub..mm:make": "a model is named as package.module:function",
    "mm:make:make": "a model is named as package.module:function",
    "mm:make()": "a model is named as package.module:function",
    "mm:\x1b[31mmake\n": "a model is named as package.module:function",
    "größe:make": "größe cannot be imported",
    "no_such:make": "run the command in the folder with this module",
    "sub.no_such:make": "run the command in the folder with this module",
    "mm.inner:make": "run the command in the folder with this module",
    "mm:three": "functions  make, make_of_size",
    "mm:make_of_size": "missing a required argument: 'size'",
    "mm:make": "--library keras or torch or jax",
    "exits:make": "exits:make called sys.exit(0)",
    "exits_plainly:make": "called sys.exit()",
    "exits_in_getattr:make": "called sys.exit(0)",
    "parses:make": "called sys.exit(2)",
}
# A place for the model in each command.
COMMANDS = {
    "plan": lambda name: ("plan", name),
    "explain": lambda name: ("explain", name, "up.kernel"),
    "lint": lambda name: ("lint", name),
    "diff before": lambda name: ("diff", name, "plan.json"),
    "diff after": lambda name: ("diff", "plan.json", name),
}


def failed(capsys, arguments):
    """What is said on stderr by a command that must have failed."""
    try:
        code = main(arguments)
    except SystemExit as error:  # of argparse
        code = error.code
    out, err = capsys.readouterr()

    assert (2, "") == (code, out)
    assert escape_text(err, keep="\n") == err
    return err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_what_is_no_model_and_no_plan(command, name, capsys):
    """In each command, and in each place of it."""
    options = () if name.endswith(".json") else ("--mesh", "model=4")
    err = failed(capsys, (*COMMANDS[command](name), *options))

    assert NAMES[name] in err
    assert "Traceback" not in err


THEIRS = {
    "raises": ('File "{folder}/raises.py", line 4, in <module>', r"KeyError: '\x1b[31mred'"),
    "raises_os": ('File "{folder}/raises_os.py", line 1, in <module>', "FileNotFoundError: "),
    "raises_base": ('File "{folder}/raises_base.py", line 2, in <module>', "raises_base.Stop"),
    "recurses": ('File "{folder}/recurses.py", line 4, in <module>', "RecursionError: "),
    "imports": ('File "{folder}/imports.py", line 1, in <module>', "No module named 'no_such_inner'"),
    "syntax": ('File "{folder}/syntax.py", line 1', "SyntaxError: "),
    "latin_py": ("", "SyntaxError: "),
    "moves": ('File "{folder}/moves.py", line 3, in <module>', "ValueError: moved"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("module", THEIRS)
def test_an_exception_of_the_users_code(command, module, folder, capsys):
    """Its traceback starts in the user's file, and shows no line of this library."""
    err = failed(capsys, (*COMMANDS[command](f"{module}:make"), "--mesh", "model=4"))
    lines = [line.strip() for line in err.splitlines() if line.strip().startswith("File ")]

    assert THEIRS[module][0].format(folder=folder) == (lines[0] if THEIRS[module][0] else "")
    assert THEIRS[module][1] in err
    assert [] == [line for line in lines if os.sep + "layoutmap" + os.sep in line]
    assert "Stop" if module == "raises_base" else f"\nlayoutmap: {module}:make raised " in err
    assert str(folder) == os.getcwd()


OPTIONS = {
    ("--rules", "latin.yaml"): "save the file as UTF-8",
    ("--rules", "missing.yaml"): "name a file that exists",
    ("--rules", "sub"): "Is a directory",
    ("--rules", "deep.yaml"): "deep.yaml: ",
    ("--rules", "list.yaml"): "list.yaml: ",
    ("--mesh", "model"): "batch=2,model=4",
    ("--mesh", "model=-4"): "model",
    ("--mesh", "model=1e400"): "batch=2,model=4",
    ("--mesh", f"model={'9' * 5000}"): "batch=2,model=4",
    ("--mesh", "\x1b[31m=\n"): "batch=2,model=4",
    ("--preset", "lama"): "choose from",
    ("--backend", "numpy"): "choose from",
    ("--inputs",): "expected at least one argument",
    **{
        ("--mesh", "model=4", "--inputs", *texts): "write it as in --inputs"
        for texts in (
            ("float32",),
            ("float32[8",),
            ("[8]",),
            ("float32[8 8]",),
            ("float32[8,,8]",),
            ("float32[-1,8]",),
            ("float32[None,8]",),
            ("float32[1.5]",),
            ("float32[\u0661]",),
            (f"float32[{'9' * 5000}]",),
            ("float33[8]",),
            ("\x1b[31m",),
        )
    },
    ("--mesh", "model=4", "--inputs", "a=int32[8]", "int32[8]"): "name all of them",
    ("--mesh", "model=4", "--inputs", "int32[8]", "a=int32[8]"): "name all of them",
    ("--mesh", "model=4", "--inputs", "a=int32[8]", "a=int32[8]"): "two inputs have the same name",
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ascii(options)[:60])
def test_options_that_cannot_be(command, options, capsys):
    """They are refused before the model is made."""
    err = failed(capsys, (*COMMANDS[command]("mm:make"), *options))

    assert OPTIONS[options] in err
    assert "Traceback" not in err


SIZES = ["80", "-80GiB", "nan", "infGiB", "1e400GiB", "9" * 5000 + "GiB", "0GiB", "0.0000000001KB", "80XB"]
SIZES += ["", "GiB", "\u0663GiB", "80gib", "\x1b[31mGiB"]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: ascii(size)[:20])
def test_memory_that_no_device_has(size, capsys):
    """It says how a size is written, and repeats no page of digits."""
    err = failed(capsys, ("plan", "plan.json", f"--device-memory={size}"))

    assert 'as in "80GiB"' in err.splitlines()[-1]
    assert len(err.splitlines()[-1]) < 250


OTHERS = {
    (): "required",
    ("pan",): "choose from",
    ("pan\x1b[31m\n",): "choose from",
    ("plan",): "required",
    ("diff", "plan.json"): "required",
    ("plan", "plan.json", "--\x9b2J"): "unrecognized arguments",
    ("plan", "plan.json", "--batch-dim", "data"): "use one of 'model'",
    ("lint", "plan.json", "--batch-dim", "data"): "use one of 'model'",
    ("explain", "plan.json", "up.\x1b"): "layoutmap plan plan.json",
    ("devices", "--engine", "numpy"): "choose from",
    ("completion", "cmd"): "choose from",
    ("plan", "plan.json", "--library", "torch"): "leave out --library",
}


@pytest.mark.parametrize("arguments", OTHERS, ids=ascii)
def test_other_arguments_that_cannot_be(arguments, capsys):
    """Commands, paths, dims."""
    err = failed(capsys, arguments)

    assert OTHERS[arguments] in err
    assert "Traceback" not in err


def test_an_exit_at_the_end_of_the_process_changes_nothing(folder):
    """`sys.exit(0)` in the module and again in `atexit`: exit code 2."""
    ran = subprocess.run(
        [sys.executable, "-m", "layoutmap", "plan", "exits_late:make", "--mesh", "x=2"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (2, "") == (ran.returncode, ran.stdout)
    assert "layoutmap: exits_late:make called sys.exit()\n" in ran.stderr
