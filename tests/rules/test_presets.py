"""A preset is a layout map as any other, on a mesh whose dims have any names; and it is in what users install."""

from __future__ import annotations

import pytest

import layoutmap as lm
from layoutmap.core.errors import LayoutMapError, RuleError
from layoutmap.rules import presets, zoo

MESH = lm.Mesh(None, "data=2,tp=4")


def without(layout_map: lm.LayoutMap, dim: str) -> dict[str, lm.Layout]:
    """The rules of a map with the axes unsharded that it shards over a dim."""
    cut = {p: layout.sharding_specs for p, layout in layout_map.items()}
    return {p: lm.Layout([None if spec == dim else spec for spec in specs], MESH) for p, specs in cut.items()}


@pytest.mark.parametrize("name", presets.list_presets())
def test_a_preset_is_the_same_on_meshes_with_other_names(name: str):
    """Renaming the dims of the mesh renames them in every rule, and does nothing else."""
    there = lm.LayoutMap.preset(name, lm.Mesh(None, "batch=2,model=4"), fsdp_dim="batch")
    renamed = {"batch": "data", "model": "tp", "unsharded": "unsharded"}
    here = lm.LayoutMap.preset(name, MESH, model_dim="tp", fsdp_dim="data")

    for expected, actual in ((there, here), (there.activations, here.activations)):
        assert [
            (r.pattern, tuple(renamed[spec] for spec in r.layout.sharding_specs), r.uneven)
            for r in expected.rules
        ] == [(r.pattern, r.layout.sharding_specs, r.uneven) for r in actual.rules]


@pytest.mark.parametrize("name", presets.list_presets())
def test_a_dim_that_is_not_asked_for_shards_nothing(name: str):
    """Each form is the one over both dims without the other dim; activations have rules with `fsdp_dim`."""
    both = lm.LayoutMap.preset(name, MESH, model_dim="tp", fsdp_dim="data")
    model = lm.LayoutMap.preset(name, MESH, model_dim="tp")
    fsdp = lm.LayoutMap.preset(name, MESH, model_dim=None, fsdp_dim="data")

    assert without(both, "data") == {**model}
    assert without(both, "tp") == {**fsdp}
    assert (both.activations, {}) == (fsdp.activations, {**model.activations})
    assert both.activations


@pytest.mark.parametrize("name", presets.list_presets())
def test_a_preset_is_written_to_a_file_and_read_back(name: str):
    """It is an ordinary map, and begins with what it is for."""
    layout_map = lm.LayoutMap.preset(name, MESH, model_dim="tp", fsdp_dim="data")

    assert layout_map == lm.LayoutMap.from_yaml(layout_map.to_yaml())
    assert (" in flax.nnx" if name.endswith("_nnx") else " of keras-hub") in presets.describe_preset(name)


def test_rules_of_ones_own_come_after_it_or_in_its_place():
    """Another rule is added, one is taken out, and the preset that is asked for next is as before."""
    layout_map = lm.LayoutMap.preset("llama", MESH, model_dim="tp")
    before = dict(layout_map)
    first = next(iter(layout_map))
    del layout_map[first]
    layout_map[r"head\.kernel$"] = (None, "tp")

    assert {*before, r"head\.kernel$"} - {first} == set(layout_map)
    assert before == {**lm.LayoutMap.preset("llama", MESH, model_dim="tp")}


def test_what_there_is_not_is_reported():
    """With the presets there are, or the dims that the mesh has."""
    with pytest.raises(RuleError) as unknown:
        lm.LayoutMap.preset("lama", MESH)
    assert """\
there is no preset 'lama'
  presets  bert, gemma, gemma_nnx, gpt2, gpt2_nnx, llama, llama_nnx, mixtral, qwen, qwen_nnx, t5, vit, whisper
  fix      did you mean 'llama'?""" == str(unknown.value)

    fixes = {}
    for name in ("mistral", "XLM-RoBERTa", "bart", "llama3"):
        with pytest.raises(RuleError) as unknown:
            lm.LayoutMap.preset(name, MESH)
        fixes[name] = unknown.value.fix
    assert {
        "mistral": "use 'llama': its rules fit mistral, too",
        "XLM-RoBERTa": "use 'bert': its rules fit XLM-RoBERTa, too",
        "bart": "use one of them, or LayoutMap.from_yaml for a file",
        "llama3": "did you mean 'llama'?",
    } == fixes

    with pytest.raises(RuleError) as missing:
        lm.LayoutMap.preset("llama", MESH)
    assert """\
preset 'llama': model_dim 'model' is not a dim of the mesh
  mesh  data=2, tp=4
  why   weights are sharded over it
  fix   use one of 'data', 'tp', or pass None""" == str(missing.value)

    with pytest.raises(RuleError, match="fsdp_dim 'batch' is not a dim of the mesh"):
        lm.LayoutMap.preset("llama", MESH, model_dim="tp", fsdp_dim="batch")
    with pytest.raises(RuleError, match="'tp'"):
        lm.LayoutMap.preset("llama", MESH, model_dim="tp", fsdp_dim="tp")


def test_each_published_model_has_a_preset():
    """And there is one of each preset for keras-hub."""
    of_hub = {name for name in presets.list_presets() if not name.endswith("_nnx")}
    assert of_hub == {model.preset for model in zoo.list_models().values()}

    with pytest.raises(LayoutMapError, match="did you mean 'llama3_405b'"):
        zoo.find_model("llama_405b")


def test_a_model_whose_library_is_missing_says_what_to_install():
    """Here no library is installed that could make one."""
    with pytest.raises(LayoutMapError, match="pip install keras-hub"):
        zoo.find_model("llama3_8b").make()
