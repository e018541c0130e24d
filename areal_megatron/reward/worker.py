"""A reward worker: scores one answer after the other, in a process that can be killed. Started by workers.py.

Frames on stdin and stdout are four bytes of length and msgpack. The first frame out is Ready; then each
Answer in gets one Scored out. Whatever the reward function prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from areal_megatron.config import ConfigError
from areal_megatron.reward.function import checked, load_function

HEADER = struct.Struct("<I")


class Ready(msgspec.Struct):
    problem: str = ""


class Answer(msgspec.Struct):
    prompt: str
    response: str
    answer: str


class Scored(msgspec.Struct):
    score: float
    problem: str = ""
    feedback: str = ""


def serve(function_name: str, timeout_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    def reply(message: msgspec.Struct) -> None:
        frame = msgspec.msgpack.encode(message)
        replies.write(HEADER.pack(len(frame)) + frame)
        replies.flush()

    try:
        function = load_function(function_name, timeout_s)
    except ConfigError as e:
        reply(Ready(str(e)))
        return
    reply(Ready())
    decode = msgspec.msgpack.Decoder(Answer).decode
    while header := requests.read(HEADER.size):
        job = decode(requests.read(HEADER.unpack(header)[0]))
        try:
            score, feedback = checked(function(job.prompt, job.response, job.answer))
            reply(Scored(score, feedback=feedback))
        except Exception as e:  # the function is the user's: any failure is a wrong answer, never the end of the run
            reply(Scored(0.0, f"{type(e).__name__}: {e}"))


def main() -> None:
    if sys.platform == "linux":  # a worker stuck in the user's code would not notice that its controller died
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.argv[1], float(sys.argv[2]), sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
