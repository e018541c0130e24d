"""The inside of a sandbox, which sandbox.py starts as a program of its own; `main` documents the arguments.

There are three processes. The guard makes the namespaces and stays outside of the new pid namespace. Init is process 1
in it: it builds the file system and waits for the third process, the program. When init ends, the kernel kills all that
is left in its namespace. The guard kills init when standard input is closed, also by the death of its parent, and the
kernel kills init when the guard dies. None of this depends on the program: it can neither see nor signal the guard, and
init ignores its signals and holds capabilities that keep it from being traced.

Imports little, since every program waits for it. man pages: namespaces(7), user_namespaces(7), pid_namespaces(7),
pivot_root(2), mount_setattr(2), seccomp(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import struct
import sys

PROGRAM_ID = 1000
"""User and group of the program inside the sandbox."""
SCRATCH = "/tmp"
START = """
__builtins__.exit = __builtins__.quit = __import__("sys").exit
exec(compile(open("/program", "rb").read(), "/program", "exec"))
"""
"""Starts the program. Python runs without its site module, through which any installed package may run code; `exit` and
`quit`, which that module defines, are added."""

_CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mount uts ipc user pid net
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH, _SYS_MOUNT_SETATTR = -100, 0x8000, 2, 442
_SIGINT, _SIGKILL, _SIG_DFL = 2, 9, None
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 23, 24, 38
_PR_SET_THP_DISABLE = 41

_libc = ctypes.CDLL(None, use_errno=True)


def guard(texts: dict[str, bytes], limits: dict[str, int], visible: list[str], report) -> None:
    """Makes the namespaces, starts init in them and ends it when standard input is closed."""
    _call("unshare", _CLONE_NEW)
    report("unshared")
    if not os.read(0, 1):  # the parent maps users and groups now, since only it may map two of them
        return
    alive, held_by_init = os.pipe()
    guarded, held_by_guard = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(held_by_guard)
            init(texts, limits, visible, report, guarded)
        except Exception as e:
            report(f"problem {e}")
        finally:
            os._exit(1)
    os.close(held_by_init)
    select.select([0, alive], [], [])
    os.kill(pid, _SIGKILL)
    os.waitpid(pid, 0)


def init(texts: dict[str, bytes], limits: dict[str, int], visible: list[str], report, guarded: int) -> None:
    """Builds what the program sees, runs the program and reports how it ended. Raises OSError."""
    _libc.signal(_SIGINT, _SIG_DFL)  # process 1 ignores signals only if it has no handler for them
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if select.select([guarded], [], [], 0)[0]:
        return  # the guard died before the line above
    _write("/proc/self/oom_score_adj", b"1000")  # out of memory, the kernel kills the program first
    _build_root(visible, limits["scratch_mb"])
    _write("/program", texts["program"])
    _write("/stdin", texts["stdin"])
    _set_attributes("/", _ATTR_RDONLY)
    os.chdir(SCRATCH)

    child = os.fork()
    if child == 0:
        try:
            _become_program(limits, texts["calls"])
        except Exception as e:  # the sandbox failed, not the program
            report(f"problem {e}")
        finally:
            os._exit(1)
    ended, status = None, 0
    while ended != child:
        ended, status = os.wait()
    report(f"status {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def _build_root(visible: list[str], scratch_mb: int) -> None:
    """Makes a new root file system of the visible paths, read-only, two devices and the scratch folder."""
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    base = "/proc"  # no longer needed, and contains no visible path
    _call("mount", b"root", base.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755")
    os.mkdir(base + SCRATCH)
    options = f"size={scratch_mb}m,nr_inodes=4096,mode=1777"
    _call("mount", b"scratch", (base + SCRATCH).encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    for path in visible:
        _show(path, base, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for device in ("/dev/null", "/dev/urandom"):
        _show(device, base, _ATTR_RDONLY | _ATTR_NOSUID)
    os.chdir(base)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _show(path: str, base: str, attributes: int) -> None:
    place = base + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        open(place, "xb").close()
    _call("mount", path.encode(), place.encode(), None, _MS_BIND | _MS_REC, None)
    _set_attributes(place, attributes)


def _set_attributes(path: str, attributes: int) -> None:
    """Adds to the attributes of a mount and all mounts below it; a plain remount would have to repeat the existing
    ones."""
    wanted = ctypes.create_string_buffer(struct.pack("=4Q", attributes, 0, 0, 0), 32)
    flags = _AT_RECURSIVE if path != "/" else 0
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, wanted, len(wanted))


def _become_program(limits: dict[str, int], calls: bytes) -> None:
    os.setsid()
    os.dup2(os.open("/stdin", os.O_RDONLY), 0)
    _limit(resource.RLIMIT_AS, limits["memory_mb"] << 20)
    _limit(resource.RLIMIT_CPU, limits["cpu_s"], margin=1)  # SIGXCPU, then SIGKILL a second later
    _limit(resource.RLIMIT_FSIZE, limits["scratch_mb"] << 20)
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 1)  # 0 would still start the machine's crash handler, outside of the sandbox
    _limit(resource.RLIMIT_NPROC, limits["threads"])
    _limit(resource.RLIMIT_SIGPENDING, 64)
    for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
        _limit(kind, 0)
    _call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)  # a huge page is held as long as one of its 512 pages is
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        capability += 1
    _libc.setgroups(0, None)  # refused if the program is the same user outside; the groups are its own then
    os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _filter_calls(calls)
    environment = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    python = os.path.realpath(sys.executable)
    os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", "-c", START], environment)


def _limit(kind: int, value: int, margin: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    highest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(kind, (min(value, highest), min(value + margin, highest)))


def _filter_calls(instructions: bytes) -> None:
    """Lets the kernel answer all system calls from here on as the seccomp filter says."""
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(buffer)))
    _call("prctl", _PR_SET_SECCOMP, 2, program, 0, 0)


def _take(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _call(function: str, *arguments) -> None:
    """Calls a function of libc. Raises OSError that names the function and its text arguments."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if getattr(_libc, function)(*words) < 0:
        number = ctypes.get_errno()
        names = (a.decode() for a in arguments if isinstance(a, bytes))
        raise OSError(number, f"{' '.join([function, *names])}: {os.strerror(number)}")


def main() -> None:
    """Arguments: descriptors of the program's text, its input, the seccomp filter and for reports; four limits; the
    visible paths."""
    *given, reports = map(int, sys.argv[1:5])
    os.set_inheritable(reports, False)

    def report(line: str) -> None:
        os.write(reports, line.encode() + b"\n")

    try:
        texts: dict[str, bytes] = dict(zip(("program", "stdin", "calls"), map(_take, given), strict=True))
        names = "cpu_s", "memory_mb", "threads", "scratch_mb"
        limits: dict[str, int] = dict(zip(names, map(int, sys.argv[5:9]), strict=True))
        guard(texts, limits, sys.argv[9:], report)
    except Exception as e:
        report(f"problem {e}")


if __name__ == "__main__":
    main()
