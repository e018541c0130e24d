"""The messages of the `tinker` package that are Protocol Buffers: samples and a loss in, arrays out.

Only fields that are used here are named; others are passed over. A map is written as what it is on the wire: repeated
entries of a key and a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from areal_megatron.config import ConfigError

_MESSAGES = {
    "Text": {"tokens": (1, "bytes")},
    "Chunk": {"text": (1, "Text"), "image": (2, "bytes"), "sound": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse": (2, "bytes"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "NamedTensor": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"chunks": (1, "Chunk*"), "inputs": (2, "NamedTensor*")},
    "Value": {"number": (1, "double"), "text": (2, "string")},
    "Setting": {"key": (1, "string"), "value": (2, "Value")},
    "Request": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "forward_only": (6, "bool"),
        "settings": (7, "Setting*"),
    },
    "Batched": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "shape": (4, "int64*")},
    "NamedBatch": {"key": (1, "string"), "value": (2, "Batched")},
    "Records": {"type": (1, "string"), "fields": (2, "NamedBatch*"), "count": (3, "int64")},
    "Metric": {"key": (1, "string"), "value": (2, "double")},
    "Output": {"type": (1, "string"), "records": (2, "Records*"), "metrics": (3, "Metric*")},
    "Sequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "Likely": {"tokens": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "int32"), "length": (4, "int32")},
    "Sampled": {"sequences": (1, "Sequence*"), "prompt_logprobs": (2, "bytes"), "likely": (3, "Likely")},
}
"""Message → field → its number and type; `*`: any number of them."""
_FLOAT32, _DTYPES = 1, {1: np.dtype("<f4"), 2: np.dtype("<i8")}
_STOP, _LENGTH = 0, 1
_UNKNOWN = -99999.0
"""What clients take for no log-probability in the place of a likely token."""


@dataclass(frozen=True)
class Datum:
    """What a loss is computed for: n tokens, and what belongs to each."""

    tokens: list[int]
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    """Name → [n]."""


@dataclass(frozen=True)
class LossRequest:
    model: str
    number: int
    """The place of the request among those for the model."""
    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    learns: bool


def read_request(body: bytes) -> LossRequest:
    """Raises ConfigError for what is no request, or holds anything but tokens."""
    message = _CLASSES["Request"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise ConfigError(
            "forward_backward: the body is no request of a tinker client that this server knows"
        ) from None
    values = {setting.key: setting.value for setting in message.settings}
    settings = {key: value.text or value.number for key, value in values.items()}
    data = [_datum(datum, f"data {place}") for place, datum in enumerate(message.data)]
    return LossRequest(message.model_id, message.seq_id, data, message.loss_fn, settings, not message.forward_only)


def loss_reply(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """`logprobs`: float32 for each datum."""
    message = _CLASSES["Output"](type="ArrayRecord")
    records = message.records.add(type="ArrayRecord", count=len(logprobs))
    batch = records.fields.add(key="logprobs").value
    batch.dtype = _FLOAT32
    batch.data = b"".join(own.astype("<f4").tobytes() for own in logprobs)
    batch.offsets = np.cumsum([0, *(4 * len(own) for own in logprobs)]).astype("<i8").tobytes()
    for key, value in metrics.items():
        message.metrics.add(key=key, value=value)
    return message.SerializeToString()


@dataclass(frozen=True)
class PromptScore:
    """Log-probabilities of a prompt of n tokens; NaN for tokens that nothing is told of."""

    logprobs: np.ndarray | None
    """float32 [n]; None: they were not asked for."""
    likely_tokens: np.ndarray
    """int32 [n, k]: the likeliest tokens in the place of each."""
    likely_logprobs: np.ndarray
    """float32 [n, k]"""


def sample_reply(
    answers: Sequence[tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray, bool]],
    prompt: PromptScore | None = None,
) -> bytes:
    """`answers`: tokens, their log-probabilities, and whether they were cut."""
    message = _CLASSES["Sampled"]()
    if prompt:
        if prompt.logprobs is not None:
            message.prompt_logprobs = prompt.logprobs.astype("<f4").tobytes()
        message.likely.length, message.likely.k = prompt.likely_tokens.shape
        unknown = np.isnan(prompt.likely_logprobs)
        message.likely.tokens = np.where(unknown, 0, prompt.likely_tokens).astype("<i4").tobytes()
        message.likely.logprobs = np.where(unknown, _UNKNOWN, prompt.likely_logprobs).astype("<f4").tobytes()
    for tokens, logprobs, cut in answers:
        message.sequences.add(
            stop_reason=_LENGTH if cut else _STOP,
            tokens=np.asarray(tokens, "<i4").tobytes(),
            logprobs=np.asarray(logprobs, "<f4").tobytes(),
        )
    return message.SerializeToString()


def _datum(message, where: str) -> Datum:
    tokens = []
    for chunk in message.chunks:
        if chunk.image or chunk.sound:
            raise ConfigError(f"{where}: has an image or a sound; here are texts alone")
        tokens += _array(chunk.text.tokens, np.dtype("<i4"), f"{where}: model_input").tolist()
    inputs = {}
    for each in message.inputs:
        tensor, place = each.value, f"{where}: {each.key}"
        if tensor.sparse or tensor.dtype not in _DTYPES or len(tensor.shape) > 1:
            raise ConfigError(f"{place}: must be a dense array with one number for each token")
        found = _array(tensor.dense, _DTYPES[tensor.dtype], place)
        if len(found) != len(tokens):
            raise ConfigError(f"{place}: has {len(found)} elements, and model_input {len(tokens)} tokens")
        inputs[each.key] = found
    return Datum(tokens, inputs)


def _array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ConfigError(f"{where}: {len(data)} bytes are no array of {dtype.name}")
    return np.frombuffer(data, dtype)


def _classes() -> dict[str, type]:
    file = descriptor_pb2.FileDescriptorProto(name="areal/tinker_wire.proto", package="areal", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for own, (number, kind) in fields.items():
            one = message.field.add(name=own, number=number)
            one.label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            plain = kind.removesuffix("*")
            if plain in _MESSAGES:
                one.type, one.type_name = kinds.TYPE_MESSAGE, f".areal.{plain}"
            else:
                one.type = getattr(kinds, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"areal.{n}")) for n in _MESSAGES}


_CLASSES = _classes()
