"""What client and engine process say to each other beyond `outrider.request`, and how it is packed."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.request import (
    AbortRequests,
    AddRequest,
    GetStats,
    Shutdown,
    StatsReply,
    StepOutputs,
)


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: build the engine with this configuration."""

    config: dict[str, Any]  # the fields of EngineConfig
    factory: str  # module:function that makes an Engine of an EngineConfig
    log_level: int
    log_style: str = "text"


class EngineInfo(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is built; what its users must know of it."""

    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    start_seconds: float


class EngineFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The engine cannot start, or cannot go on; the process ends after this."""

    reason: str  # one sentence for the user


ToEngine = Start | AddRequest | AbortRequests | GetStats | Shutdown
FromEngine = EngineInfo | EngineFailure | StepOutputs | StatsReply

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
