"""Put faults into a copy of the source, one at a time, and see how soon drawn cases find each.

    python tools/faults.py              all of them, two minutes each at the most
    python tools/faults.py --publish    and write the table of docs/evidence.md
    python tools/faults.py 3 7          these alone

A fault that no law finds in its time is a hole in the evidence: the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import evidence

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 2.0


@dataclass(frozen=True)
class Fault:
    """A change of one place in the source that makes it wrong.

    Args:
        title: The fault, in words.
        file: The file, below src/layoutmap.
        right: The text there.
        wrong: The text that takes its place.
        subjects: On which models it can show.
    """

    title: str
    file: str
    right: str
    wrong: str
    subjects: str = "keras-jax"


FAULTS = (
    Fault(
        "a shard begins one element late",
        "core/layout.py",
        "slice(min(i * part, n or 0), min((i + 1) * part, n or 0)) for i, part, n in parts",
        "slice(min(min(i, 1) + i * part, n or 0), min((i + 1) * part + min(i, 1), n or 0)) for i, part, n in parts",
        "torch",
    ),
    Fault(
        "the first and the last spec of a rule are swapped",
        "core/uneven.py",
        'if uneven in ("error", "pad") or layout.rank != len(shape):\n        return layout',
        'if uneven in ("error", "pad") or layout.rank != len(shape):\n'
        "        swapped = Layout(layout.sharding_specs[::-1], layout.mesh)\n"
        "        return layout if swapped.rank != len(shape) or swapped.find_uneven_axes(shape) else swapped",
        "nnx",
    ),
    Fault(
        "a rule matches anywhere in a path",
        "rules/index.py",
        "pattern.search if self._matches_anywhere else pattern.match",
        "pattern.search",
    ),
    Fault(
        "shrinking takes the fewest shards that divide",
        "core/uneven.py",
        "return max((s for s in subsets if size % counts[s] == 0)",
        "return min((s for s in subsets if size % counts[s] == 0)",
    ),
    Fault(
        "all equal initializers draw from one seed",
        "engines/jax/engine.py",
        "array = wait_for_computation_on_cpu(program(seeds[key]))",
        "first = self.__dict__.setdefault('_first', {}).setdefault(id(program), seeds[key])\n"
        "                        array = wait_for_computation_on_cpu(program(first))",
    ),
    Fault(
        "gradients of grouped convolutions are left to XLA",
        "engines/jax/corrections.py",
        "for size in mesh_shape) and not _permanent_use:",
        "for size in mesh_shape) and not _permanent_use and not mesh_shape:",
        "nnx",
    ),
    Fault(
        "gradients of the shards of a batch are averaged, not summed up",
        "engines/torch/gather/gradients.py",
        "joined = reduce_over_devices(joined, parameters[0].device_mesh, mesh_dim, reduce_op)",
        "joined = reduce_over_devices(joined, parameters[0].device_mesh, mesh_dim, reduce_op)\n"
        "    joined = joined / parameters[0].device_mesh.size(mesh_dim)",
        "torch",
    ),
    Fault(
        "the mean of a normalization is that of one shard",
        "engines/torch/dtensor_ops/norms.py",
        "mean = sum_over_devices(y.sum(axes, keepdim=True), mesh, summed) / count",
        "mean = y.mean(axes, keepdim=True)",
        "torch,keras-torch",
    ),
    Fault(
        "the gradient of one shard of the batch stands for all",
        "engines/torch/gather/gradients.py",
        "part.clone().view(piece.shape), copy_spec_with_placement(",
        "piece.clone().view(piece.shape), copy_spec_with_placement(",
        "torch",
    ),
    Fault(
        "a checkpoint puts a chunk where its neighbour belongs",
        "checkpoint/reader.py",
        "target[overlap.block_index] = values if overlap.chunk_index is None else values[overlap.chunk_index]",
        "target[overlap.block_index] = np.flip(values if overlap.chunk_index is None else values[overlap.chunk_index])",
    ),
    Fault(
        "a batch that does not divide loses its last rows",
        "adapters/keras/backends/jax_steps.py",
        "leaf = engine.canonicalize_values(np.array(leaf))",
        "rows = np.array(leaf)[: max(len(leaf) // 4 * 4, 1)] if leaf.ndim else leaf; "
        "leaf = session.engine.canonicalize_values(rows)",
    ),
    Fault(
        "slots are counted twice in the memory of a plan",
        "plan/memory.py",
        "slots = sum(a.device_bytes for a in fitting if a.variable.kind is Kind.SLOT)",
        "slots = 2 * sum(a.device_bytes for a in fitting if a.variable.kind is Kind.SLOT)",
    ),
    Fault(
        "the bytes of a shard are those of the whole tensor",
        "core/variables.py",
        "return math.ceil(math.prod(self.shard_shape) * get_itemsize(self.variable.dtype))",
        "return math.ceil(math.prod(self.variable.shape) * get_itemsize(self.variable.dtype))",
    ),
    Fault(
        "rules that match nothing are not reported",
        "plan/planner.py",
        "(problems, unused), *of_rules]",
        "(problems, unused), *(p for p in of_rules if p.kind != 'unused rule')]",
    ),
    Fault(
        "an axis that does not divide is no problem",
        "core/layout.py",
        "    def find_uneven_axes(self, global_shape: Sequence[int | None]) -> tuple[int, ...]:\n"
        '        """Return the axes of a shape that the layout cannot split evenly. Unknown sizes count as even."""\n',
        "    def find_uneven_axes(self, global_shape: Sequence[int | None]) -> tuple[int, ...]:\n"
        '        """Return the axes of a shape that the layout cannot split evenly. Unknown sizes count as even."""\n'
        "        return ()\n",
    ),
    Fault(
        "the command line drops the limit of memory",
        "cli/main.py",
        "plan.set_limits(device_memory=options.device_memory,",
        "plan.set_limits(device_memory=None,",
    ),
    Fault(
        "the page has a verdict of its own",
        "report/page/data.py",
        '"says": verdict.headline,',
        '"says": "fits",',
    ),
    Fault(
        "a fingerprint depends on when the plan was made",
        "plan/json.py",
        "return hashlib.sha256(text.encode()).hexdigest()[:16]",
        "return hashlib.sha256(f'{text}{id(plan)}'.encode()).hexdigest()[:16]",
    ),
    Fault(
        "a slot is not laid out as its weight",
        "core/uneven.py",
        "specs = [parent.list_mesh_dims(of[0]) if of else () for of in axes]",
        "specs = [() for _ in axes]",
        "keras-jax",
    ),
    Fault(
        "blocks are read in the order of another mesh",
        "engines/jax/arrays.py",
        "block = np.array(read(tuple(slice(*pair) for pair in ends)), copy=copy or None)",
        "block = np.array(read(tuple(slice(*pair) for pair in ends)), copy=copy or None)\n"
        "        block = block[::-1] if block.ndim and ends[0][0] else block",
        "pytree",
    ),
    Fault(
        "a batch that does not divide is sharded all the same",
        "core/policy.py",
        "divides = shape[0] % count_batch_shards(dim, self.mesh) == 0",
        "divides = True",
        "torch",
    ),
    Fault(
        "a path has the number that Keras counts up for each layer",
        "adapters/keras/names.py",
        "return [names[id(layer)] for layer in layers]",
        "return [layer.name for layer in layers]",
    ),
    Fault(
        "a step that fails leaves a model without its weights",
        "adapters/keras/backends/jax_steps.py",
        "            last_values.restore_lost_values(error)\n",
        "            pass\n",
    ),
    Fault(
        "the mean of a loss of classes is that of one shard",
        "engines/torch/dtensor_ops/class_losses.py",
        "total = total / (x.numel() // x.shape[axis])",
        "total = total / (local.numel() // local.shape[axis])",
        "torch",
    ),
    Fault(
        "a dropped element is dropped in one shard only",
        "engines/torch/dtensor_ops/randomness.py",
        "mask = shard_like(plain(_allocate_unsharded_like(x).fill_(1), p, True), x)",
        "mask = shard_like(plain(_allocate_unsharded_like(x).fill_(1), p, True).flip(0), x)",
        "torch",
    ),
    Fault(
        "an array of a model that exists counts as replicated",
        "inspecting/inspect.py",
        "        if placement.mesh == mesh:\n            return placement\n",
        "        if placement.mesh == mesh:\n            return Layout.replicated(mesh, rank)\n",
        "nnx",
    ),
    Fault(
        "an unsharded head does not count as replicated beside a sharded model",
        "engines/torch/dtensor_ops/outside.py",
        "set_replicates_plain_tensors(True)",
        "set_replicates_plain_tensors(False)",
        "torch",
    ),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", type=int, help="which faults; none: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--publish", action="store_true", help="write the table of docs/evidence.md")
    asked = parser.parse_args(arguments)
    rows: list[list[str]] = []
    for number, fault in enumerate(FAULTS, start=1):
        if asked.numbers and number not in asked.numbers:
            continue
        if asked.list:
            print(f"{number:>2}  {fault.title} ({fault.file})")
            continue
        seconds, found = _search_fault(fault, asked.minutes, asked.seed)
        rows.append([str(number), fault.title, f"`{fault.file}`", found or "**not found**", f"{seconds:.0f}"])
        print(f"{number:>2}  {seconds:4.0f} s  {found or 'NOT FOUND'}: {fault.title}", flush=True)
    if asked.publish:
        evidence.publish_faults(rows, asked.minutes)
    return int(any("not found" in row[3] for row in rows))


def _search_fault(fault: Fault, minutes: float, seed: int) -> tuple[float, str]:
    """Return the seconds until drawn cases found a fault, and the law and case that found it, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "layoutmap" / fault.file
        text = file.read_text(encoding="utf-8")
        if text.count(fault.right) != 1:
            raise SystemExit(
                f"{fault.title}: {fault.file} has its text {text.count(fault.right)} times, not once"
            )
        file.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
        command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), *fault.subjects.split(",")]
        command += ["--minutes", str(minutes), "--seed", str(seed), "--until-found", "--results", folder]
        started = time.monotonic()
        run = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
        )
        found = re.search(r"^(?:wrong|failed): (\S+): (.+)$", run.stdout, re.MULTILINE)
        if run.returncode not in (0, 1):
            raise SystemExit(f"{fault.title}: {run.stderr[-2000:]}")
        return time.monotonic() - started, f"{found[2]} ({found[1]})" if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
