"""Describe published models at full size without their values, to plan them before anything is loaded.

`zoo.yaml` has for each model the class in a model library, the configuration that determines the shapes of its weights,
and the preset with its rules. The library is imported when the model is built.

    layoutmap plan keras_hub:llama3_405b --mesh batch=512,model=8 --fsdp-dim batch
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from layoutmap.core.errors import LayoutMapError


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A public model: its class, configuration, and matching preset.

    Args:
        name: Its name, such as `"llama3_405b"`.
        kind: Its class, as in `"keras_hub.models:Llama3Backbone"`.
        preset: The preset with its rules: `LayoutMap.preset(model.preset, mesh)`.
        num_parameters: Number of elements of its weights.
        config: The arguments of its class.
    """

    name: str
    kind: str
    preset: str
    num_parameters: int
    config: Mapping[str, Any] = field(hash=False)

    @property
    def package(self) -> str:
        """The package of its class: `"keras_hub"`."""
        return self.kind.partition(".")[0]

    def make(self, **options: object) -> Any:
        """Return the model, built with the stored configuration. A plan or scope around this call applies to it.

        Args:
            options: Arguments of its class besides `config`, such as `dtype="bfloat16"`. They replace equal names.

        Raises:
            LayoutMapError: Its library is not installed.
        """
        module, _, name = self.kind.partition(":")
        try:
            kind = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise LayoutMapError(
                f"{self.name}: {error.name} cannot be imported",
                why=f"the model is of the class {self.kind}",
                fix=f"pip install {self.package.replace('_', '-')}",
            ) from error
        return kind(**{**self.config, **options})


@functools.cache
# Libraries name the same weight differently, so each model is stored with the preset that fits it (decisions/0024).
def list_models() -> Mapping[str, PublishedModel]:
    """Return all published models by name.

    Example:
        >>> from layoutmap.rules import zoo
        >>> zoo.list_models()["llama3_405b"].num_parameters
        405853388800
    """
    import yaml

    data = yaml.safe_load(files("layoutmap.rules").joinpath("zoo.yaml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: PublishedModel(
                name, facts["class"], facts["preset"], facts["parameters"], MappingProxyType(facts["config"])
            )
            for name, facts in data.items()
        }
    )


def find_model(name: str) -> PublishedModel:
    """Return the published model of this name.

    Raises:
        LayoutMapError: There is no model of this name.

    Example:
        >>> import layoutmap as lm
        >>> from layoutmap.rules import zoo
        >>> bert = zoo.find_model("bert_large")
        >>> lm.plan(bert.make, lm.LayoutMap.preset(bert.preset, lm.Mesh(None, "batch=64,model=8")), library="keras")
        <Plan: 464 variables on batch=64, model=8, 1.2 GiB, 162.1 MiB per device; no problems>
    """
    known = list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise LayoutMapError(
            f"{name!r} is not a known published model",
            facts={"known": ", ".join(known)},
            why="nothing is downloaded, so only models with a stored configuration can be planned",
            fix=f"did you mean {near[0]!r}?"
            if near
            else "use one of them, or pass a function that builds your model",
        )
    return known[name]
