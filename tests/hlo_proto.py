"""A second reader of the bytes that a compiled module sends: it walks XLA's protobuf and knows no text.

It shares no code with the library: XLA itself parses or makes the protobuf, each device is followed on its own, and
sizes are those of operands, where the library reads those of results (why: decisions/0156).
"""

import json
from collections import Counter, defaultdict
from itertools import product
from math import prod

from jaxlib import _hlo

# Fields of HloModuleProto, HloComputationProto and HloInstructionProto.
COMPUTATIONS, ENTRY = 3, 6
INSTRUCTIONS, COMPUTATION = 2, 5
OPCODE, SHAPE, INSTRUCTION, OPERANDS, CALLED, BACKEND = 2, 3, 35, 36, 38, 43
GROUPS, PAIRS, LISTED, IOTA, MESH_AXES = 49, 52, 87, 92, 93
RUNNING = ("async-start", "call", "conditional", "fusion", "while")
# PrimitiveType: bits of an element.
BITS = {
    1: 8,
    2: 8,
    3: 16,
    4: 32,
    5: 64,
    6: 8,
    7: 16,
    8: 32,
    9: 64,
    10: 16,
    11: 32,
    12: 64,
    15: 64,
    16: 16,
    18: 128,
}
BITS |= dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33), 8) | {21: 4, 22: 4, 26: 2, 27: 2, 32: 4}
KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-broadcast": "all_gather",
    "collective-permute": "permute",
    "reduce-scatter": "reduce_scatter",
}


def sent_by_text(text, num_devices):
    """Return what `sent_by_proto` does, of a text that XLA parses."""
    module = _hlo.hlo_module_from_text(text)
    return sent_by_proto(module.as_serialized_hlo_module_proto(), num_devices)


def sent_by_proto(data, num_devices):
    """Return the bytes that the busiest device of each collective sends in a run of a module, by kind."""
    module = decode(data)
    bodies = {}
    for each in map(decode, module[COMPUTATIONS]):
        bodies[number(each, COMPUTATION)] = [decode(one) for one in each[INSTRUCTIONS]]
    sent = Counter()
    run(bodies, number(module, ENTRY), 1, num_devices, sent)
    return {kind: num_bytes for kind, num_bytes in sent.items() if num_bytes}


def run(bodies, name, times, num_devices, sent):
    made = {number(each, INSTRUCTION): each for each in bodies[name]}
    for each in bodies[name]:
        opcode = each[OPCODE][0].decode()
        if opcode in RUNNING:
            for inner in numbers(each[CALLED]):
                before = sent.total()
                trips = loop_trips(each) if opcode == "while" else 1
                run(bodies, inner, times * (trips or 1), num_devices, sent)
                assert trips or before == sent.total(), "a loop of unknown length"
        elif kind := KINDS.get(opcode.removesuffix("-start")):
            given = [shape_bytes(made[operand][SHAPE][0]) for operand in numbers(each[OPERANDS])]
            of_devices = Counter()
            for device, num_bytes in device_bytes(kind, opcode, each, given, num_devices):
                of_devices[device] += num_bytes
            sent[kind] += times * max(of_devices.values(), default=0)


def device_bytes(kind, opcode, each, given, num_devices):
    """Each device of a collective and the bytes that it sends on a ring of its group."""
    if kind == "permute":
        for pair in map(decode, each[PAIRS]):
            source, target = number(pair, 1), number(pair, 2)
            yield source, sum(given) * (source != target)
        return
    for group in groups(each, num_devices):
        others = len(group) - 1
        if opcode.startswith("all-gather"):
            num_bytes = sum(given) * others  # its own piece, and those of all others but one
        else:
            num_bytes = sum(given) * others / len(group) * (2 if kind == "all_reduce" else 1)
        yield from ((device, num_bytes) for device in group)


def groups(each, num_devices):
    """The devices of each group, in each of the forms that XLA stores."""
    if each[IOTA]:
        iota = decode(each[IOTA][0])
        return split(reordered(numbers(iota[3]), numbers(iota[4])), number(iota, 2))
    if each[MESH_AXES]:
        return groups_of_mesh(decode(each[MESH_AXES][0]))
    listed = decode(each[LISTED][0])[1] if each[LISTED] else each[GROUPS]
    found = [numbers(decode(one)[1]) for one in listed]
    return found or [list(range(num_devices))]


def groups_of_mesh(found):
    mesh = decode(found[1][0])
    sizes = [number(decode(axis), 2) for axis in mesh[1]]
    iota = decode(mesh[3][0]) if mesh[3] else {1: [prod(sizes)], 2: []}
    order = numbers(mesh[2]) or reordered(numbers(iota[1]), numbers(iota[2]))
    taken = {}
    for reference in map(decode, found[2]):
        part = decode(reference[2][0]) if reference[2] else None
        taken.setdefault(number(reference, 1), []).append(
            (number(part, 1), number(part, 2)) if part else (1, sizes[number(reference, 1)])
        )
    of_key = defaultdict(list)
    for device, place in zip(order, product(*map(range, sizes)), strict=True):
        key = []
        for axis, (at, size) in enumerate(zip(place, sizes, strict=True)):
            for before, length in taken.get(axis, ()):
                stride = size // before // length
                at -= at // stride % length * stride  # the digit along which devices exchange
            key.append(at)
        of_key[tuple(key)].append(device)
    return [*of_key.values()]


def reordered(sizes, order):
    """Numbers from 0 on in a shape, with its axes in another order, row by row."""
    order = order or range(len(sizes))
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    places = product(*(range(sizes[axis]) for axis in order))
    return [sum(at * strides[axis] for at, axis in zip(place, order, strict=True)) for place in places]


def split(devices, size):
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def loop_trips(each):
    known = json.loads(each[BACKEND][0]).get("known_trip_count") if each[BACKEND] else None
    return int(known["n"]) if known else 0


def shape_bytes(data):
    shape = decode(data)
    if shape[4]:  # a tuple
        return sum(map(shape_bytes, shape[4]))
    return prod(numbers(shape[3])) * BITS[number(shape, 2)] // 8


def number(message, field):
    """A whole number, which is not stored where it is 0."""
    return message[field][0] if message[field] else 0


def numbers(values):
    """Whole numbers of a repeated field, packed or not."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        place = 0
        while place < len(value):
            each, place = varint(value, place)
            found.append(each)
    return found


def decode(data):
    """Values of a message's fields by number: whole numbers and bytes."""
    found, place = defaultdict(list), 0
    while place < len(data):
        key, place = varint(data, place)
        if key & 7 == 0:
            value, place = varint(data, place)
        else:
            length, place = varint(data, place) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], place)
            value, place = data[place : place + length], place + length
        found[key >> 3].append(value)
    return found


def varint(data, place):
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
