"""The pre-commit hooks and the CI step guard the layouts of a small project: that of the page about them."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import frameworks
import pytest
import yaml

import layoutmap as lm
from layoutmap.core.variables import VariableSpec
from layoutmap.plan.completeness import make_unbuilt_layers_problem
from layoutmap.scope.plan import make_plan

PAGE = (frameworks.ROOT / "docs" / "how-to" / "guard-layouts-in-ci.md").read_text(encoding="utf-8")
CONFIG, WORKFLOW = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M))
ACTION = yaml.safe_load((frameworks.ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((frameworks.ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
EDIT = r"s/down.*/down\\.kernel: [null, model]/"
MOVED = "down.kernel  layout  (model, unsharded) -> (unsharded, model)"


def run(command, folder, **variables):
    """A command where this layoutmap is the one that is installed."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(frameworks.PACKAGE.parent),
        "PRE_COMMIT_HOME": str(folder.parent / "pre-commit"),
        **variables,
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def commit(folder):
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["commit", "-q", "--no-verify", "-m", "x"],
        ["rev-parse", "HEAD"],
    ):
        ran = run(["git", *command], folder)
        assert 0 == ran.returncode, ran.stderr
    return ran.stdout.strip()


@pytest.fixture
def project(tmp_path):
    """The files of the page, and two plans of its model, before and after the rules were edited."""
    (tmp_path / "project").mkdir()
    os.chdir(folder := tmp_path / "project")
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
    exec(program, {})
    rules = Path("rules.yaml").read_text()
    variables = [
        VariableSpec(f"{name}.kernel", shape, "float32")
        for name, shape in (("up", (512, 2048)), ("down", (2048, 512)))
    ]
    for name, text in (
        ("plan", rules),
        ("edited", re.sub("(?m)^  down.*", r"  down\\.kernel: [null, model]", rules)),
    ):
        plan = make_plan(variables, lm.LayoutMap.from_yaml(text))
        Path(f"{name}.json").write_text(plan.to_json())
    unbuilt = plan.add_problem(make_unbuilt_layers_problem("Net", ["head"], called=False))
    Path("unbuilt.json").write_text(unbuilt.to_json())
    return folder


@pytest.fixture(autouse=True)
def back(monkeypatch):
    monkeypatch.chdir(Path.cwd())


def run_action(folder, **given):
    """Run the action's steps as GitHub does; return the exit code, the outputs and the job's summary."""
    inputs = {name: str(each.get("default", "")) for name, each in ACTION["inputs"].items()} | given
    assert set(ACTION["inputs"]) == set(inputs)
    files = {name: folder.parent / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for file in files.values():
        file.write_text("")
    for step in ACTION["runs"]["steps"]:
        script = folder.parent / "step.sh"
        script.write_text(step["run"])
        variables = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: inputs[found[1]], value)
            for name, value in step["env"].items()
        }
        assert "bash" == step["shell"]
        ran = run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            folder,
            **variables,
            **{name: str(file) for name, file in files.items()},
        )
        if ran.returncode:
            break
    return ran.returncode, files["GITHUB_OUTPUT"].read_text(), files["GITHUB_STEP_SUMMARY"].read_text()


SAME = "### Layouts of `plan.json`\n\n````text\nno change\n````\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": "plan.json"}, (0, "changed=false\n", SAME)),
        ({"model": "edited.json"}, (1, "changed=true\n", MOVED)),
        ({"model": "edited.json", "fail": "false"}, (0, "changed=true\n", MOVED)),
        ({"model": "edited.json", "plan": "none.json"}, (2, "", "")),
        ({"model": "$(touch ran).json"}, (2, "", "")),
        ({"model": "unbuilt.json"}, (2, "", "")),
        ({"model": "unbuilt.json", "plan": "unbuilt.json", "fail": "false"}, (2, "", "")),
        (
            {"model": "unbuilt.json", "options": "--partial"},
            (1, "changed=true\n", "the plan after is incomplete"),
        ),
    ],
)
def test_the_step_shows_what_moves_and_fails_if_it_is_to(given, expected, project):
    """The summary has the difference, the output says whether there is one; without a whole plan there is neither."""
    code, output, summary = run_action(project, **given)

    assert expected[:2] == (code, output)
    assert expected[2] in summary
    assert not (project / "ran").exists()


def hooks_of(folder, **change):
    """A repository with the hooks of this one, and the page's configuration that takes them from there."""
    folder.mkdir()
    (folder / ".pre-commit-hooks.yaml").write_text(yaml.safe_dump([{**hook, **change} for hook in HOOKS]))
    (repository,) = copy.deepcopy(CONFIG["repos"])  # a test changes what is passed to the hooks
    return {"repos": [{**repository, "repo": str(folder), "rev": commit(folder)}]}


def run_hooks(project, config):
    (project / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    commit(project)
    ran = run([sys.executable, "-m", "pre_commit", "run", "--all-files"], project)
    return [line.rpartition("...")[2] for line in ran.stdout.splitlines() if "..." in line], ran.stdout


def test_the_hooks_pass_what_was_agreed_on_and_stop_what_was_not(project, tmp_path):
    """A plan that is kept and rules that are right pass; a weight that moves and a regex that is none do not."""
    # The environment of the hook for rules files would be installed from the network.
    config = hooks_of(tmp_path / "hooks", language="system")
    (rules, diff) = config["repos"][0]["hooks"]
    assert [each["id"] for each in HOOKS] == [rules["id"], diff["id"]]

    diff["args"] = ["plan.json", "plan.json"]
    assert ["Passed", "Passed"] == run_hooks(project, config)[0]

    diff["args"] = ["unbuilt.json", "unbuilt.json"]
    results, text = run_hooks(project, config)
    assert ["Passed", "Failed"] == results
    assert "unbuilt.json: the plan is incomplete: Net: 1 layer has no weights yet: head" in text

    diff["args"] = ["plan.json", "edited.json"]
    (project / "rules.yaml").write_text((project / "rules.yaml").read_text().replace("up", "up("))
    results, text = run_hooks(project, config)
    assert ["Failed", "Failed"] == results
    assert MOVED in text
    assert "rules.yaml: 2 errors" in text
    assert r"rule 'up(\\.kernel' is not a regex" in text


@pytest.mark.long
def test_the_page_guards_its_own_model(project, tmp_path):
    """With the arguments that the page has, the hook and the step compare a model of JAX with its plan."""
    config = hooks_of(tmp_path / "hooks", language="system")
    step = WORKFLOW["jobs"]["layouts"]["steps"][-1]
    assert re.fullmatch(r"OWNER/layoutmap@v\d+\.\d+\.\d+", step["uses"])
    plan = f"layoutmap plan {step['with']['model']} {step['with']['options']} --json plan.json"
    assert f"$ {plan}\n" in PAGE
    assert 0 == run(["bash", "-c", plan], project).returncode

    assert ["Passed", "Passed"] == run_hooks(project, config)[0]
    assert (0, "changed=false\n") == run_action(project, **step["with"])[:2]
    assert 0 == run(["sed", "-i", EDIT, "rules.yaml"], project).returncode
    assert ["Passed", "Failed"] == run_hooks(project, config)[0]
    code, output, summary = run_action(project, **step["with"])
    assert (1, "changed=true\n") == (code, output)
    assert MOVED in summary
    assert f"If this is meant: `{plan}`" in summary


@pytest.mark.long
def test_the_hook_for_rules_files_has_an_environment_of_its_own(project):
    """Installed by pre-commit from this checkout, with what the core needs and no framework."""
    command = [
        sys.executable,
        "-m",
        "pre_commit",
        "try-repo",
        str(frameworks.ROOT),
        "layoutmap-rules",
        "--all-files",
    ]
    commit(project)
    ran = run(command, project, PYTHONPATH="")

    assert 0 == ran.returncode, ran.stdout + ran.stderr
    (project / "rules.yaml").write_text((project / "rules.yaml").read_text().replace("up", "up("))
    ran = run(command, project, PYTHONPATH="")
    assert (1, True) == (ran.returncode, "is not a regex" in ran.stdout)
