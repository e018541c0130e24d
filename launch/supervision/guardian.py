"""Ends the sessions whose ids it has read from stdin once stdin closes: their owner has ended, perhaps by SIGKILL. A
negative id takes back a session that was ended: the id may be another's by now.

python -m areal_megatron.launch.supervision.guardian TEMPORARY      # their folder for temporary files, which is removed
"""

import shutil
import signal
import sys

from areal_megatron.launch.supervision.processes import end_sessions
from areal_megatron.launch.supervision.shared_memory import SharedMemory


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its owner, not before
    shared = SharedMemory()
    sessions: set[int] = set()
    for session in map(int, sys.stdin):
        sessions.add(session) if session > 0 else sessions.discard(-session)
    end_sessions(sessions, shared)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
