"""Write the support tables of docs/what-works.md and the README from the results of the contract tests.

    python tools/works.py                    run the contracts and write the tables
    python tools/works.py --check FILE ...   fail if the tables are not what these JUnit files say

The README has a line for each model library: `yes` where all laws of a group hold, and the drawn models of
docs/evidence.json. In the long table the rows are the
laws of `AdapterContract` and `ScopeContract`, the columns the classes in the tests that inherit them.
A cell says `yes` if the law passed there, and the reason in words if it was skipped. What Keras does in depth, and
what people do with it, have tables of their own, of tests that run on each backend; they say `no` where a test shows
that something is refused. `make test-all` checks the tables against its own results.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layoutmap.testing.subjects import get_subject

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "docs" / "evidence.json"
DRAWN = "[drawn models](docs/evidence.md) for which all laws held"
SUMMARY, PAGE = ROOT / "README.md", ROOT / "docs" / "what-works.md"
START, END = "<!-- works: made by tools/works.py -->", "<!-- /works -->"

ALL_ADAPTERS, WITH_SCOPES = (
    ("layoutmap.testing.adapter_contract", name) for name in ("AdapterContract", "ScopeContract")
)
ALL_ENGINES = ("layoutmap.testing.engine_contract", "EngineContract")
# Class of the tests -> column.
ADAPTERS = {
    "TestKerasOnJax": "Keras 3 on JAX",
    "TestKerasOnTensorFlow": "Keras 3 on TensorFlow",
    "TestKerasOnTorch": "Keras 3 on PyTorch",
    "TestTorch": "torch.nn",
    "TestNnx": "flax.nnx",
    "TestPytrees": "pytrees of JAX",
}
WITHOUT_SCOPES = ("TestNnx", "TestPytrees")
# What the README says of a library -> the laws that show it.
GROUPS = {
    "plan first": (
        "test_the_build_follows_the_plan",
        "test_a_plan_creates_no_array",
        "test_a_plan_does_not_change_later_builds",
    ),
    "build": ("test_each_variable_lies_in_the_layout_of_its_rule", "test_paths_are_stable"),
    "same first values": ("test_values_do_not_depend_on_the_mesh",),
    "lay out what exists": (
        "test_apply_keeps_the_values_of_an_existing_model",
        "test_written_values_are_read_back",
    ),
    "train like one device": ("test_training_matches_the_unsharded_model",),
    "save, load on any mesh": ("test_a_checkpoint_is_loaded_on_any_mesh",),
    "`with scope()`": (
        "test_the_library_is_unchanged_after_a_scope",
        "test_the_inner_of_two_scopes_gives_the_layouts",
    ),
}
ENGINES = {"TestJaxEngine": "JAX", "TestTensorFlowEngine": "TensorFlow", "TestTorchEngine": "PyTorch"}
LIMITS = "tests/adapters/test_keras_unsupported_tensorflow.py"
FILES = {
    "jax": (
        "tests/adapters/test_keras_contract.py",
        "tests/adapters/test_jax_contract.py",
        "tests/engines/test_jax.py",
    ),
    "tensorflow": (
        "tests/adapters/test_keras_contract_tensorflow.py",
        "tests/engines/test_tensorflow.py",
        LIMITS,
    ),
    "torch": (
        "tests/adapters/test_keras_contract_torch.py",
        "tests/adapters/test_torch_contract.py",
        "tests/engines/test_torch.py",
    ),
}
# Test with one case for each layer -> what it shows of them.
LAYERS = {
    "test_what_is_wanted_replicated_is_gathered": "weights stay sharded, and are gathered when the layer is called",
    "test_what_dtensor_has_no_gradient_of_trains": "trains, by other operations than TensorFlow's own",
    "test_a_loop_over_time_is_unrolled": "trains, with its loop over time unrolled; the plan says so",
}

BACKENDS = {"jax": "Keras 3 on JAX", "tensorflow": "Keras 3 on TensorFlow", "torch": "Keras 3 on PyTorch"}
# What is shown -> the tests that show it, everywhere or by process; what a test of REFUSED shows is that it does not.
TRAINING, DATA, SAVING = "test_keras_training", "test_keras_data", "test_keras_saving"
ACTIVATIONS, DERIVED = "test_keras_activations", "test_keras_derived"
ON = {process: f"test_keras_on_{process}" for process in BACKENDS}
RUNS = f"{TRAINING}.test_every_way_of_running_a_step_gives_the_same"
ADDED = f"{TRAINING}.test_what_optimizers_add_trains_like_one_device"
DEPTH: dict[str, str | tuple[str, ...] | dict[str, str]] = {
    "`fit`, `evaluate`, `predict`, a last batch that does not divide": (
        f"{TRAINING}.test_fit_evaluate_and_predict_give_the_numbers_of_one_device"
    ),
    "`train_on_batch`, `test_on_batch`, `predict_on_batch`": (
        f"{TRAINING}.test_single_batches_give_the_numbers_of_one_device"
    ),
    "a loop by hand (on JAX `stateless_call` and `stateless_apply`)": {
        "jax": f"{ON['jax']}.test_a_loop_by_hand_works",
        "tensorflow": f"{ON['tensorflow']}.test_a_loop_by_hand_with_a_tape",
        "torch": f"{ON['torch']}.test_a_loop_of_ones_own",
    },
    "`jit_compile=True`": {
        "jax": f"{TRAINING}.test_fit_evaluate_and_predict_give_the_numbers_of_one_device",  # as Keras does there
        "tensorflow": f"{ON['tensorflow']}.test_compiling_with_xla_gives_the_same",
        "torch": f"{ON['torch']}.test_compiled_steps_are_refused",
    },
    "`jit_compile=False`, `run_eagerly=True`": (
        f"{RUNS}[{{'jit_compile': False}}]",
        f"{RUNS}[{{'run_eagerly': True}}]",
    ),
    "`steps_per_execution`": {
        "jax": f"{RUNS}[{{'steps_per_execution': 2}}]",
        "tensorflow": f"{RUNS}[{{'steps_per_execution': 2}}]",
        "torch": f"{ON['torch']}.test_several_steps_in_one_execution_are_refused",
    },
    "each of Keras's optimizers, and `MultiOptimizer`": (
        "test_keras_optimizers.test_every_optimizer_of_keras_trains_like_one_device"
    ),
    "accumulated gradients": f"{ADDED}[accumulation]",
    "`clipnorm`, `global_clipnorm`, `clipvalue`": (
        f"{ADDED}[clipnorm]",
        f"{ADDED}[global_clipnorm]",
        f"{ADDED}[clipvalue]",
    ),
    "mixed precision, `LossScaleOptimizer`, also where gradients overflow": (
        f"{TRAINING}.test_mixed_precision_trains_like_one_device",
        f"{TRAINING}.test_half_precision_with_a_scale_of_the_loss",
    ),
    "`use_ema`, and a second `fit`": f"{TRAINING}.test_averaged_weights_survive_a_second_fit",
    "`EarlyStopping`, `LearningRateScheduler`, `TensorBoard`": (
        f"{DATA}.test_callbacks_see_a_complete_model",
        f"{DATA}.test_tensorboard_gets_the_losses",
    ),
    "`ModelCheckpoint`, `BackupAndRestore`": (
        f"{DATA}.test_a_checkpoint_of_a_callback_is_a_complete_model",
        f"{DATA}.test_training_that_was_interrupted_goes_on",
    ),
    "generators, `PyDataset`, `tf.data`": (
        f"{DATA}.test_data_may_come_from_a_generator_or_a_dataset",
        f"{DATA}.test_data_may_come_from_tensorflow",
    ),
    "`.keras`, `.weights.h5`, `.weights.json`: each value is read once, in blocks, and no initializer runs": (
        f"{SAVING}.test_loading_in_a_scope_reads_each_value_once_and_draws_nothing"
    ),
    "while weights are loaded or set, no device holds more of one than its shard": (
        f"{SAVING}.test_no_device_holds_more_than_a_shard_while_weights_are_loaded",
        f"{SAVING}.test_setting_weights_from_numpy_puts_no_global_value_on_a_device",
    ),
    "while a model is saved, the host holds one variable at a time": (
        f"{SAVING}.test_saving_holds_one_variable_at_a_time"
    ),
    "a compiled model that is loaded in a scope trains on": f"{SAVING}.test_a_loaded_model_trains_on",
    "files of other models, or broken ones, change nothing": (
        f"{SAVING}.test_a_file_of_another_model_changes_nothing",
        f"{SAVING}.test_a_broken_file_changes_nothing",
    ),
    "an interrupt while weights are loaded leaves a model that works": (
        f"{SAVING}.test_an_interrupt_while_weights_are_loaded"
    ),
    "`.h5` files of Keras 2's kind": f"{SAVING}.test_files_of_keras_2s_kind_are_loaded",
    "rules for activations": (
        f"{ACTIVATIONS}.test_a_model_with_them_trains_like_one_device",
        f"{ACTIVATIONS}.test_a_layer_outputs_what_its_rule_says",
    ),
    "`uneven=`: one key head on 2, 4 and 8 devices": (
        "test_keras_uneven.test_one_head_of_keys_on_many_devices"
    ),
    "LoRA, int4, float8, int8 embeddings: they follow their weights, by loose rules and strict ones": (
        f"{DERIVED}.test_a_derived_variable_is_sharded_where_its_parent_is"
    ),
    "int8 layers with int8 inputs": {
        "jax": f"{DERIVED}.test_layers_with_inputs_in_int8",
        "tensorflow": f"{DERIVED}.test_layers_with_inputs_in_int8_are_refused",
        "torch": f"{DERIVED}.test_layers_with_inputs_in_int8",
    },
    "several processes: values, seeds and losses of one": {
        "jax": "test_keras_processes.test_each_brings_its_rows_and_all_get_the_numbers_of_one_process",
        "tensorflow": "test_keras_processes_same_batch.test_two_processes_train_one_model",
        "torch": "test_keras_processes_same_batch.test_two_processes_train_one_model",
    },
    "no module of Keras is changed after a scope": (
        "test_keras_hooks.test_a_scope_changes_what_is_listed_and_leaves_no_trace"
    ),
}
WHY = {
    f"{ON['torch']}.test_compiled_steps_are_refused": "torch.compile does not trace a step on a mesh",
    f"{ON['torch']}.test_several_steps_in_one_execution_are_refused": "Keras has none on PyTorch",
    f"{DERIVED}.test_layers_with_inputs_in_int8_are_refused": "DTensor has no product of int8",
}
REFUSED = ("_are_refused", "_is_refused")
# One law with a case for each thing that people do; its name is the row.
USUAL = "test_keras_usual", "test_what_people_do_gives_the_numbers_of_one_device"
PROCESSES = {
    "jax": "test_keras_processes",
    "tensorflow": "test_keras_processes_same_batch",
    "torch": "test_keras_processes_same_batch",
}
DEPTH_FILES = (
    TRAINING,
    DATA,
    SAVING,
    ACTIVATIONS,
    DERIVED,
    "test_keras_uneven",
    "test_keras_optimizers",
    "test_keras_hooks",
    USUAL[0],
)


# The tables come from tests, so that no cell is an opinion (decisions/0140).
def run_contracts() -> dict[tuple[str, str], str]:
    """Run the contracts and return the outcome for each class and law."""
    outcomes: dict[tuple[str, str], str] = {}
    for process, files in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / f"{process}.xml"
            depth = [f"tests/adapters/{name}.py" for name in (*DEPTH_FILES, ON[process], PROCESSES[process])]
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *files, *depth],
                cwd=ROOT,
                env={**os.environ, "LAYOUTMAP_TEST_PROCESS": process},
            )
            read_outcomes(results, outcomes)
    return outcomes


def read_outcomes(results: Path, outcomes: dict[tuple[str, str], str]) -> None:
    """Add the outcome for each class and law in a JUnit file named for its test process.

    Tests that run in several processes have one outcome per process, with the key `process:module`.

    Of what runs in several processes there is one for each, by `process:module`.
    """
    process = results.name.partition(".")[0]
    for case in ET.parse(results).getroot().iter("testcase"):
        where, name = case.get("classname", "").rpartition(".")[2], case.get("name", "")
        # Of a law one outcome is kept for all its cases; a layer is a case, and each is kept.
        key = where, name if name.partition("[")[0] in LAYERS else name.partition("[")[0]
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "**no**"
        elif skipped is not None:
            outcome = skipped.get("message", "skipped")
        else:
            outcome = "yes"
        outcomes[f"{process}:{where}", name] = outcome
        if outcomes.get(key, "yes") == "yes":  # of a law with several cases, one that does not hold counts
            outcomes[key] = outcome


def format_table(outcomes: dict[tuple[str, str], str]) -> str:
    """Return the long table: one row per adapter law, and counts of the engine laws."""
    rows = [_format_row("models", ADAPTERS.values()), _format_row("---", ["---"] * len(ADAPTERS))]
    for law, sentence in list_laws(ALL_ADAPTERS):
        rows.append(_format_row(sentence, [outcomes.get((test, law), "not run") for test in ADAPTERS]))
    for law, sentence in list_laws(WITH_SCOPES):
        said = dict.fromkeys(WITHOUT_SCOPES, "`build` only")
        rows.append(
            _format_row(
                sentence, [said.get(test) or outcomes.get((test, law), "not run") for test in ADAPTERS]
            )
        )
    rows += [
        "",
        _format_row("Keras in depth", BACKENDS.values()),
        _format_row("---", ["---"] * len(BACKENDS)),
    ]
    rows += [
        _format_row(what, [_merge_outcomes(outcomes, tests, process) for process in BACKENDS])
        for what, tests in DEPTH.items()
    ]
    rows += [
        "",
        _format_row("what people do with Keras", BACKENDS.values()),
        _format_row("---", ["---"] * len(BACKENDS)),
    ]
    start = f"{USUAL[1]}["
    things = {name for (where, name) in outcomes if where.endswith(f":{USUAL[0]}") and name.startswith(start)}
    rows += [
        _format_row(
            name[len(start) : -1],
            [outcomes.get((f"{process}:{USUAL[0]}", name), "not run") for process in BACKENDS],
        )
        for name in sorted(things)
    ]
    rows += ["", _format_row("arrays", ENGINES.values()), _format_row("---", ["---"] * len(ENGINES))]
    all_laws = list_laws(ALL_ENGINES)
    counts = [sum(outcomes.get((test, law)) == "yes" for law, _ in all_laws) for test in ENGINES]
    rows.append(_format_row("laws of engines that hold", [f"{count} of {len(all_laws)}" for count in counts]))
    rows += ["", _format_row("on TensorFlow's DTensor", ["layers"]), _format_row("---", ["---"])]
    for test, meaning in LAYERS.items():
        shown = [
            name[len(test) + 1 : -1]
            for (where, name), said in outcomes.items()
            if ":" not in where and name.startswith(f"{test}[") and said == "yes"
        ]
        rows.append(_format_row(meaning, [", ".join(shown) or "not run"]))
    return "\n".join(rows)


def format_summary(outcomes: dict[tuple[str, str], str]) -> str:
    """Return the README's table: one row per library with its groups of laws and its drawn models."""
    drawn = {
        get_subject(subject).title: f"{found['all held']} of {found['cases'] - found['refused']}"
        for subject, found in json.loads(EVIDENCE.read_text(encoding="utf-8")).items()
    }
    rows = [_format_row("models", [*GROUPS, DRAWN]), _format_row("---", ["---"] * (len(GROUPS) + 1))]
    of_scopes = {law for law, _ in list_laws(WITH_SCOPES)}
    for test, library in ADAPTERS.items():
        cells: list[str] = []
        for group in GROUPS.values():
            without = test in WITHOUT_SCOPES and of_scopes.issuperset(group)
            said = ["no" if without else outcomes.get((test, law), "not run") for law in group]
            cells.append(next((each for each in said if each != "yes"), "yes"))
        rows.append(_format_row(library, [*cells, drawn.get(library, "none yet")]))
    return "\n".join(rows)


def _merge_outcomes(
    outcomes: dict[tuple[str, str], str], tests: str | tuple[str, ...] | dict[str, str], process: str
) -> str:
    """Return the outcome of tests on one backend: `yes`, `no` and the reason, or the first failure."""
    of_process = tests.get(process) if isinstance(tests, dict) else tests
    if of_process is None:
        return "not tested"
    said: list[str] = []
    for test in [of_process] if isinstance(of_process, str) else of_process:
        module, _, name = test.partition(".")
        cases = [
            outcome
            for (where, case), outcome in outcomes.items()
            if where == f"{process}:{module}" and (case == name or case.startswith(f"{name}["))
        ]
        no = f"no: {WHY[test]}" if name.endswith(REFUSED) else ""
        said += [(no if no and o == "yes" else o) for o in cases] or ["not run"]
    return next((each for each in said if each != "yes"), "yes")


def list_laws(contract: tuple[str, str]) -> list[tuple[str, str]]:
    """Return a contract's own tests, each with the sentence that states its law."""
    module, name = contract
    contract_class = getattr(importlib.import_module(module), name)
    members: dict[str, Any] = {}
    for each in reversed(contract_class.__mro__):
        if each is contract_class or not each.__name__.endswith("Contract"):
            members |= vars(each)
    return [
        (law, (test.__doc__ or law).strip().partition("\n")[0].rstrip("."))
        for law, test in members.items()
        if law.startswith("test_")
    ]


def _format_row(first: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", nargs="+", type=Path, metavar="FILE", help="change nothing; fail if the table is old"
    )
    args = parser.parse_args()
    outcomes: dict[tuple[str, str], str] = {}
    for results in args.check or ():
        read_outcomes(results, outcomes)
    found = outcomes if args.check else run_contracts()
    for page, made in ((SUMMARY, format_summary(found)), (PAGE, format_table(found))):
        text = page.read_text(encoding="utf-8")
        new = f"{START}\n\n{made}\n\n{END}"
        written = re.sub(
            f"{re.escape(START)}.*{re.escape(END)}", lambda _, new=new: new, text, flags=re.DOTALL
        )
        if args.check and written != text:
            where = page.relative_to(ROOT)
            print(f"{where}: its table is not what the tests say; fix: make works", file=sys.stderr)
            lines = difflib.unified_diff(text.splitlines(), written.splitlines(), n=0, lineterm="")
            print(*lines, sep="\n", file=sys.stderr)
            return 1
        page.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
