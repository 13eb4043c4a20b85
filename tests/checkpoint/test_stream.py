"""Streams of weights between torch models: every part arrives, bit for bit, or the receiver keeps what it has."""

import json
import os
import random
import signal
import socket
import threading
import time
import weakref
from pathlib import Path

import forked
import pytest
import torch
from checkpoint_models import assert_equal, make, read_files
from streams import SECONDS, exchange, join, parse, record, replay, send
from streams import make as encode_record_header

import layoutmap as lm
from layoutmap.adapters import get_model_adapter
from layoutmap.checkpoint import model_values
from layoutmap.core.errors import CheckpointError
from layoutmap.engines import get_engine
from layoutmap.saving import stream as stream_module

PROCESSES = ("torch",)

WORKER = Path(__file__).with_name("stream_end_process.py")
NAMES = ("Mixtral", "Qwen3Moe", "DeepseekV3", "Llama", "LoRA")


def make_module(seed=0, width=300):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    return module.to(torch.float32)


def copy_state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# -- names


@pytest.mark.parametrize("name", NAMES)
def test_plain_transformers_reads_what_is_yielded(name, tmp_path):
    """Names, shapes, and bits are those of `save_pretrained`, and `from_pretrained` makes the same model of them."""
    model = make(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = dict(lm.stream(model, names="checkpoint"))
    assert_equal(read_files(tmp_path), found)
    if name != "LoRA":
        options = {"config": model.config, "dtype": torch.bfloat16}  # of which some layers make float32
        other = type(model).from_pretrained(None, state_dict=found, **options)
        assert_equal(type(model).from_pretrained(tmp_path, **options).state_dict(), other.state_dict())
        for key, tensor in other.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[key].to(tensor.dtype)), key
    else:
        import peft

        other = make(name, seed=1, dtype=torch.bfloat16)
        peft.set_peft_model_state_dict(other, found)
        expected = {n: t for n, t in model.state_dict().items() if "lora_" in n}
        assert_equal(expected, {n: t for n, t in other.state_dict().items() if "lora_" in n})
        base = make("Llama", dtype=torch.bfloat16)  # plain transformers, which adds an adapter
        base.load_adapter(peft_config=model.peft_config["default"], adapter_state_dict=dict(found))
        layers = {n: t for n, t in base.state_dict().items() if "lora_" in n}
        assert_equal({n.removeprefix("base_model.model."): t for n, t in expected.items()}, layers)


def test_a_tied_weight_comes_once_and_arrays_are_copies():
    model = make("Llama")
    found = dict(lm.stream(model))
    assert "lm_head.weight" not in found
    found["model.norm.weight"].zero_()
    assert model.model.norm.weight.any()


@pytest.mark.parametrize("names", [None, "checkpoint"])
def test_one_variable_is_gathered_at_a_time(names, monkeypatch):
    """The one before is gone when the next one is gathered, unless the caller keeps it."""
    model, gathered = make("Mixtral"), []
    own = type(get_engine("torch")).to_numpy

    def gather(self, array):
        assert not any(each() is not None for each in gathered)
        values = own(self, array).copy()
        gathered.append(weakref.ref(values))
        return values

    monkeypatch.setattr(type(get_engine("torch")), "to_numpy", gather)
    for _ in lm.stream(model, names=names):
        pass
    record(lm.stream(model, names=names))
    assert len(gathered) == 2 * len(get_model_adapter(model).list_stored_variables(model))


def test_only_what_has_changed_is_yielded():
    """`since={}` computes checksums, and `since=` of them yields the weights with other bits."""
    model = make("Mixtral")
    first = lm.stream(model, names="checkpoint", since={})
    assert len(first.checksums) < len(dict(first)) == len(first.checksums)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2, 3, 4] += 1
    again = lm.stream(model, names="checkpoint", since=first.checksums)
    assert ["model.layers.1.block_sparse_moe.experts.2.w1.weight"] == [name for name, _ in again]
    assert first.checksums.keys() == again.checksums.keys()


# -- ends


@pytest.mark.parametrize("name", NAMES)
def test_a_model_receives_checkpoint_names(name):
    """Experts are stacked again; what a checkpoint leaves out, as the base of an adapter, is kept."""
    model, other = make(name), make(name, seed=1)
    before = copy_state(other)
    assert send(lm.stream(model, names="checkpoint"), other, names="checkpoint") is other
    expected = {
        key: tensor if name != "LoRA" or "lora_" in key else before[key]
        for key, tensor in model.state_dict().items()
    }
    assert_equal(expected, other.state_dict())


def make_pipes():
    (one, two), (three, four) = os.pipe(), os.pipe()
    return (one, four), (three, two), lambda: [os.close(each) for each in (one, two, three, four)]


def make_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    here.settimeout(1)  # a socket that does not block is as good
    return here, there, lambda: [here.close(), there.close()]


def make_files():
    (one, two), (three, four) = os.pipe(), os.pipe()
    files = [os.fdopen(each, mode) for each, mode in ((one, "rb"), (two, "wb"), (three, "rb"), (four, "wb"))]
    return (files[0], files[3]), (files[2], files[1]), lambda: [each.close() for each in files]


@pytest.mark.parametrize("make_ends", [make_pipes, make_connection, make_files, None])
def test_any_two_ends_carry_one_stream_after_the_other(make_ends, tmp_path, monkeypatch):
    """Each call of `write` meets one of `receive`, whatever carries the bytes, in one file or in several."""
    here, there, close = make_ends() if make_ends else (tmp_path, str(tmp_path), list)
    try:
        for seed in range(3):
            monkeypatch.setattr(stream_module, "_MIN_FILE_BYTES", (1 << 30, 1, 2000)[seed])
            model, other = make_module(seed, 3000), make_module(9, 3000)
            _, errors = exchange(
                lm.stream(model), lambda o=other: lm.receive(o, there, timeout_seconds=SECONDS), here
            )
            assert not errors
            assert_equal(model.state_dict(), other.state_dict())
    finally:
        close()
    assert not list(tmp_path.iterdir())


def test_an_engine_receives_through_its_function(monkeypatch):
    """`load_weights` is called once all weights have arrived, and what it returns is returned."""
    model = make_module()
    found = send(lm.stream(model), lambda weights: dict(weights), library="torch")
    assert_equal(copy_state(model), found)
    values = send(lm.stream(model), lambda weights: dict(weights))
    assert values["0.weight"].tobytes() == model[0].weight.detach().numpy().tobytes()


def test_an_engine_that_refuses_weights_refuses_the_stream():
    def refuse(weights):
        raise ValueError("no such layer")

    here, there = socket.socketpair()
    with here, there:
        errors = []

        def receive():
            with pytest.raises(ValueError, match="no such layer"):
                lm.receive(refuse, there, timeout_seconds=SECONDS)

        _, errors = exchange(lm.stream(make_module()), receive, here)
    assert "no such layer" in str(errors[0])


def test_what_has_no_descriptor_is_refused():
    for end in (object(), (1, 2, 3), 10_000):
        with pytest.raises(CheckpointError, match="cannot be sent or received through it"):
            lm.stream(make_module()).write(end)
    with pytest.raises(CheckpointError, match="this value is not allowed"):
        lm.stream(make_module(), processes="last")


def test_types_are_converted_on_demand():
    """A float32 trainer sends to a bfloat16 sampler, as `copy_` would."""
    model, other = make_module(), make_module(1).to(torch.bfloat16)
    before = copy_state(other)
    error, _ = replay(record(lm.stream(model))[0], other)
    assert "dtype" in str(error)
    assert_equal(before, other.state_dict())
    send(lm.stream(model), other, cast=True)
    assert torch.equal(model[0].weight.to(torch.bfloat16), other[0].weight)


# -- what has not changed


def test_what_was_not_sent_is_compared_with_the_model():
    """A stacked variable of which one expert has changed has all of its other experts; a missed stream is refused."""
    model, other = make("Mixtral"), make("Mixtral", seed=1)
    first = lm.stream(model, names="checkpoint", since={})
    send(first, other, names="checkpoint")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[2] += 1
        model.lm_head.weight += 1
    second = lm.stream(model, names="checkpoint", since=first.checksums)
    data, records = record(second)
    # The header of the file, two parts of an expert, and the head.
    assert ["begin", "file", *["data"] * 4, "end"] == [kind for kind, _ in records]
    assert replay(data, other, names="checkpoint")[0] is None
    assert_equal(model.state_dict(), other.state_dict())
    with torch.no_grad():
        model.lm_head.weight += 1
    third = lm.stream(model, names="checkpoint", since=second.checksums)
    stale = make("Mixtral")
    before = copy_state(stale)
    error, answers = replay(record(third)[0], stale, names="checkpoint")
    assert "the sender did not send this unchanged weight, but the model has a different value" in str(error)
    assert "since={}" in json.loads(answers[0][1])["error"]
    assert_equal(before, stale.state_dict())
    send(third, other, names="checkpoint")
    send(lm.stream(model, names="checkpoint", since=third.checksums), other, names="checkpoint")  # nothing
    assert_equal(model.state_dict(), other.state_dict())


# -- damage


@pytest.fixture(scope="module")
def sent():
    """The bytes and records of one stream in several files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "_MIN_FILE_BYTES", 5000)
        return record(lm.stream(make_module()))


def assert_refused(data, **options):
    """A receiver raises an error with four parts, and keeps its values; the sender is told, or has gone."""
    model = make_module(1)
    before = copy_state(model)
    error, answers = replay(data, model, **options)
    assert error is not None
    assert error.what
    assert error.why
    assert error.fix
    assert_equal(before, model.state_dict())
    assert json.loads(answers[0][1])["error"]
    return str(error)


def test_a_recorded_stream_is_accepted(sent):
    model = make_module(1)
    assert replay(sent[0], model)[0] is None
    assert_equal(make_module().state_dict(), model.state_dict())


def test_a_truncated_stream_is_refused(sent):
    draw = random.Random(1)
    for length in [0, 1, len(sent[0]) - 1, *(draw.randrange(len(sent[0])) for _ in range(60))]:
        assert "has ended" in assert_refused(sent[0][:length])


def test_a_flipped_bit_is_refused(sent):
    draw = random.Random(2)
    for place in [*range(40), *(draw.randrange(len(sent[0])) for _ in range(100))]:
        data = bytearray(sent[0])
        data[place] ^= 1 << draw.randrange(8)
        assert "damaged" in assert_refused(bytes(data))


def test_other_records_are_refused(sent):
    """Each record has a number, so none is dropped, there twice, or in the place of another one."""
    places = [len(join(sent[1][:number])) for number in range(len(sent[1]))]
    parts = [sent[0][a:b] for a, b in zip(places, [*places[1:], None], strict=True)]
    assert b"".join(parts) == sent[0]
    draw = random.Random(3)
    for number in range(len(parts) - 1):
        assert_refused(b"".join(parts[:number] + parts[number + 1 :]))
        assert_refused(b"".join(parts[: number + 1] + parts[number:]))
    for _ in range(30):
        one, other = draw.sample(range(len(parts)), 2)
        swapped = list(parts)
        swapped[one], swapped[other] = parts[other], parts[one]
        assert_refused(b"".join(swapped))


def test_records_with_right_numbers_and_other_content_are_refused(sent):
    """What a program could send that knows the format: files that are missing, there twice, or of another folder."""
    records = sent[1]
    files = [number for number, (kind, _) in enumerate(records) if kind == "file"]
    assert len(files) > 2
    without_one = records[: files[0]] + records[files[1] :]
    twice = records[: files[1]] + records[files[0] : files[1]] + records[files[1] :]
    texts = [assert_refused(join(each)) for each in (without_one, twice)]
    assert all("damaged" in text or "missing" in text for text in texts), texts
    for name in (b"../model.safetensors", b"/x", b"model.safetensors\0", b"a" * 5000, b"\xff"):
        changed = list(records)
        changed[files[0]] = "file", name
        assert "is invalid or repeated" in assert_refused(join(changed))
    more = [*records[:-1], *[("data", bytes(1 << 22))] * 70, records[-1]]
    assert "more bytes than it announced" in assert_refused(join(more))
    assert "damaged" in assert_refused(join([records[0], ("data", b"x")]))
    assert "read the sender's error" in assert_refused(join([records[0], ("failed", b"")]))


def change_begin(records, change):
    begin = json.loads(records[0][1])
    change(begin)
    return join([("begin", json.dumps(begin).encode()), *records[1:]])


def test_a_hostile_announcement_is_refused(sent):
    """Before any file is read: other names, shapes and types, sizes that no file has, and headers that never end."""
    name = "0.weight"

    def assert_all_refused(*changes):
        for change in changes:
            assert_refused(change_begin(sent[1], change))

    assert_all_refused(
        lambda b: b["variables"].pop(name),
        lambda b: b["variables"].update(other=b["variables"][name]),
        lambda b: b["variables"][name].update(shape=[8, 301]),
        lambda b: b["variables"][name].update(shape=[2**62, 2**62]),
        lambda b: b["variables"][name].update(shape=[1] * 100),
        lambda b: b["variables"][name].update(shape=[-1]),
        lambda b: b["variables"][name].update(shape=[1.5]),
        lambda b: b["variables"][name].update(dtype="float64"),
        lambda b: b["variables"][name].update(dtype="object"),
        lambda b: b["variables"].update({"x" * 10_000: b["variables"][name]}),
        lambda b: b["unchanged"].update({name: "0" * 32}),
        lambda b: b["unchanged"].update(other="0"),
        lambda b: b.update(version=2),
        lambda b: b.update(token="../../x"),
        lambda b: b.pop("variables"),
        lambda b: b.update(more=1),
    )
    for payload in (b"", b"[" * 100_000, b"{}", b"null", b'{"variables": 1e999}', b"\xff"):
        assert_refused(join([("begin", payload)]))
    for length in (2**28 + 1, 2**32 - 1):
        assert "expected record 0" in assert_refused(encode_record_header(1, 0, b"x", length))
    before = len(join(sent[1][:1]))
    assert "expected record 1" in assert_refused(
        sent[0][:before] + encode_record_header(2, 1, b"x", 2**32 - 1)
    )


def test_a_safetensors_file_of_other_tensors_is_refused(sent):
    """Files with right checksums and tensors other than announced."""
    records = sent[1]
    header = next(n for n, (kind, _) in enumerate(records) if kind == "data")
    for old, new in ((b"F32", b"I32"), (b'"0.', b'"9.'), (b"[8,300]", b"[300,8]")):
        changed = list(records)
        changed[header] = "data", records[header][1].replace(old, new)
        if changed != records:
            assert_refused(join(changed))


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "add", "swap", "copy", "link", "stream"])
def test_a_damaged_folder_is_refused(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_MIN_FILE_BYTES", 1)
    model, draw = make_module(1), random.Random(4)
    before = copy_state(model)

    def receive():
        weights = tmp_path / "weights"
        while not weights.exists():
            time.sleep(0.01)
        files = sorted(weights.glob("*.safetensors"))
        one, other = draw.sample(files, 2)
        data = one.read_bytes()
        if damage == "truncate":
            one.write_bytes(data[:-1])
        elif damage == "flip":
            place = draw.randrange(len(data))
            one.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        elif damage == "remove":
            one.unlink()
        elif damage == "add":
            (weights / "model-00009-of-00009.safetensors").write_bytes(data)
        elif damage == "swap":
            one.write_bytes(other.read_bytes())
            other.write_bytes(data)
        elif damage == "copy":
            other.write_bytes(data)
        elif damage == "link":
            one.unlink()
            one.symlink_to("/dev/zero")
        else:
            data = (weights / "stream").read_bytes()
            (weights / "stream").write_bytes(data[:-30] + bytes([data[-30] ^ 1]) + data[-29:])
        with pytest.raises(CheckpointError):
            lm.receive(model, tmp_path, timeout_seconds=SECONDS)

    _, errors = exchange(lm.stream(make_module()), receive, tmp_path)
    assert "the receiver refuses the weights" in str(errors[0])
    assert_equal(before, model.state_dict())
    assert not list(tmp_path.iterdir())


def test_a_later_stream_takes_the_place_of_one_that_nobody_received(tmp_path):
    with pytest.raises(CheckpointError, match=r"there was no progress for 0\.1 seconds"):
        lm.stream(make_module()).write(tmp_path, timeout_seconds=0.1)
    other = make_module(1)
    _, errors = exchange(
        lm.stream(make_module(2)), lambda: [time.sleep(1), lm.receive(other, tmp_path)], tmp_path
    )
    assert not errors
    assert_equal(make_module(2).state_dict(), other.state_dict())
    with pytest.raises(CheckpointError, match="there was no progress"):
        lm.receive(other, tmp_path / "none", timeout_seconds=0.1)


# -- ends that end


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95, 0.9999])
def test_a_killed_sender_leaves_the_receiver_as_it_was(share):
    model = make_module(1, 20_000)
    before = copy_state(model)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = forked.start(WORKER, ["send", str(server.getsockname()[1]), str(share)], {})
        there, _ = server.accept()
        with there, pytest.raises(CheckpointError, match="has ended, or closed the connection"):
            lm.receive(model, there, timeout_seconds=SECONDS)
    assert -signal.SIGKILL == forked.wait_for_all([sender])[0].returncode
    assert_equal(before, model.state_dict())


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_killed_receiver_is_an_error_of_the_sender(share):
    """At once, and not when the time is up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = forked.start(WORKER, ["receive", str(server.getsockname()[1]), str(share)], {})
        here, _ = server.accept()
        start = time.monotonic()
        with here, pytest.raises(CheckpointError, match="has ended, or closed the connection"):
            lm.stream(make_module(0, 20_000)).write(here, timeout_seconds=250)
    assert time.monotonic() - start < 200
    assert -signal.SIGKILL == forked.wait_for_all([receiver])[0].returncode


def test_a_process_that_does_nothing_is_an_error():
    here, there = socket.socketpair()
    with here, there:
        for width in (10, 100_000):  # all fits into the buffers, or it does not
            with pytest.raises(CheckpointError, match=r"there was no progress for 0\.2 seconds"):
                lm.stream(make_module(0, width)).write(here, timeout_seconds=0.2)
    here, there = socket.socketpair()
    with here, there, pytest.raises(CheckpointError, match=r"there was no progress for 0\.2 seconds"):
        lm.receive(make_module(), there, timeout_seconds=0.2)
    assert here.gettimeout() is None


def test_a_sender_that_cannot_read_a_value_tells_the_receiver(monkeypatch):
    model = make_module(1)
    before, digest = copy_state(model), []

    def fail(self, variable, wanted):
        digest.append(variable)
        raise RuntimeError("no memory")

    monkeypatch.setattr("layoutmap.saving.model_source.ModelSource._read_block", fail)
    here, there = socket.socketpair()

    def receive():
        with pytest.raises(CheckpointError, match="read the sender's error"):
            lm.receive(model, there, timeout_seconds=SECONDS)

    with here, there:
        _, errors = exchange(lm.stream(make_module()), receive, here)
    assert "no memory" in str(errors[0])
    assert_equal(before, model.state_dict())


@pytest.mark.parametrize("number", [1, 3, 7])
def test_an_interrupt_leaves_the_old_weights_or_the_new_ones(number, monkeypatch):
    """One that comes while weights are put waits until they all are, and the sender knows."""
    model, fill, calls = make_module(1), model_values.SavedModelValues.read_into_shards, []

    def interrupt(self, variable, shards):
        calls.append(variable)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return fill(self, variable, shards)

    monkeypatch.setattr(model_values.SavedModelValues, "read_into_shards", interrupt)
    data, _ = record(lm.stream(make_module()))
    with pytest.raises(KeyboardInterrupt):
        replay_in_main_thread(data, model)
    assert_equal(make_module().state_dict(), model.state_dict())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def replay_in_main_thread(data, model):
    here, there = socket.socketpair()
    with here, there:
        feeder = threading.Thread(target=here.sendall, args=[data])
        feeder.start()
        try:
            lm.receive(model, there, timeout_seconds=SECONDS)
        finally:
            feeder.join()
            assert "" == json.loads(parse(here.recv(1 << 16))[0][1])["error"]


def test_an_interrupt_before_that_leaves_the_old_weights(monkeypatch):
    model = make_module(1)
    before = copy_state(model)

    def interrupt(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("layoutmap.saving.load.ModelLoader._verify_values", interrupt)
    here, there = socket.socketpair()

    def receive():
        with pytest.raises(KeyboardInterrupt):
            lm.receive(model, there, timeout_seconds=SECONDS)

    with here, there:
        _, errors = exchange(lm.stream(make_module()), receive, here)
    assert "KeyboardInterrupt" in str(errors[0])
    assert_equal(before, model.state_dict())


def test_a_sender_that_ends_before_the_answer_is_a_warning(monkeypatch):
    """The weights have arrived then, and cannot be taken back."""
    model = make_module(1)
    data, _ = record(lm.stream(make_module()))
    here, there = socket.socketpair()
    with there:
        with here:
            feeder = threading.Thread(target=here.sendall, args=[data])
            feeder.start()
            feeder.join()
        with pytest.warns(lm.LayoutMapWarning, match="could not be told that the weights arrived"):
            lm.receive(model, there, timeout_seconds=SECONDS)
    assert_equal(make_module().state_dict(), model.state_dict())


def test_a_spool_that_cannot_be_used_is_an_error(monkeypatch, tmp_path):
    data, _ = record(lm.stream(make_module()))
    assert "no temporary folder can be created there" in assert_refused(data, spool=str(tmp_path / "none"))
    monkeypatch.setattr("layoutmap.checkpoint.storage.LocalStorage.get_free_bytes", lambda self: 10)
    assert "not enough space" in assert_refused(data, spool=str(tmp_path))
    assert not list(tmp_path.iterdir())
