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

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table below, and the machine's identifier in linux/audit.h."""
_REFUSED = {
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    # vsock is in no namespace, and other families are kernel code that no program needs; socketpair stays
    "socket": (41, 198),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    # the machine's kernel log; and keyrings, which are handed down to children even into a new user namespace
    "syslog": (103, 116),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), 435, 0x00010000

_libc = ctypes.CDLL(None, use_errno=True)


def guard(program: bytes, stdin: bytes, limits: dict[str, int], visible: list[str], report) -> None:
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
            init(program, stdin, limits, visible, report, guarded)
        except Exception as e:
            report(f"problem {e}")
        finally:
            os._exit(1)
    os.close(held_by_init)
    select.select([0, alive], [], [])
    os.kill(pid, _SIGKILL)
    os.waitpid(pid, 0)


def init(program: bytes, stdin: bytes, limits: dict[str, int], visible: list[str], report, guarded: int) -> None:
    """Builds what the program sees, runs the program and reports how it ended. Raises OSError."""
    _libc.signal(_SIGINT, _SIG_DFL)  # process 1 ignores signals only if it has no handler for them
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if select.select([guarded], [], [], 0)[0]:
        return  # the guard died before the line above
    _write("/proc/self/oom_score_adj", b"1000")  # out of memory, the kernel kills the program first
    _build_root(visible, limits["scratch_mb"])
    _write("/program", program)
    _write("/stdin", stdin)
    _set_attributes("/", _ATTR_RDONLY)
    os.chdir(SCRATCH)

    child = os.fork()
    if child == 0:
        try:
            _become_program(limits)
        except Exception as e:  # the sandbox failed, not the program
            report(f"problem {e}")
        finally:
            os._exit(1)
    ended = None
    while ended != child:
        ended, status = os.wait()
    report(f"status {os.waitstatus_to_exitcode(status)}")
    os._exit(0)


def _build_root(visible: list[str], scratch_mb: int) -> None:
    """Makes a new root file system of the visible paths, read-only, three devices and the scratch folder."""
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    base = "/proc"  # no longer needed, and contains no visible path
    _call("mount", b"root", base.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755")
    os.mkdir(base + SCRATCH)
    options = f"size={scratch_mb}m,nr_inodes=4096,mode=1777"
    _call("mount", b"scratch", (base + SCRATCH).encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())
    for path in visible:
        _show(path, base, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
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


def _become_program(limits: dict[str, int]) -> None:
    os.setsid()
    os.dup2(os.open("/stdin", os.O_RDONLY), 0)
    _limit(resource.RLIMIT_AS, limits["memory_mb"] << 20)
    _limit(resource.RLIMIT_CPU, limits["cpu_s"], margin=1)  # SIGXCPU, then SIGKILL a second later
    _limit(resource.RLIMIT_FSIZE, limits["scratch_mb"] << 20)
    _limit(resource.RLIMIT_NOFILE, 64)
    _limit(resource.RLIMIT_CORE, 1)  # 0 would still start the machine's crash handler, outside of the sandbox
    _limit(resource.RLIMIT_NPROC, limits["threads"])
    capability = 0
    while _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        capability += 1
    _libc.setgroups(0, None)  # refused if the program is the same user outside; the groups are its own then
    os.setresgid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    os.setresuid(PROGRAM_ID, PROGRAM_ID, PROGRAM_ID)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _refuse_calls()
    environment = {"HOME": SCRATCH, "TMPDIR": SCRATCH, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    python = os.path.realpath(sys.executable)
    os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", "-c", START], environment)


def _limit(kind: int, value: int, margin: int = 0) -> None:
    _, hard = resource.getrlimit(kind)
    highest = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(kind, (min(value, highest), min(value + margin, highest)))


def _refuse_calls() -> None:
    """Makes the system calls in `_REFUSED` fail with EPERM from here on, and lets the process start threads only."""
    column, machine = _ARCHITECTURES[os.uname().machine]
    refused = [numbers[column] for numbers in _REFUSED.values() if numbers[column] is not None]
    load, equal, at_least, bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    # (operation, jump if true, jump if false, operand); a jump is the number of instructions to skip
    code = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (end, 0, 0, refuse)]  # x86_64's second numbering, x32
    for number in refused:
        code += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    code += [(equal, 0, 1, _CLONE3), (end, 0, 0, unknown)]  # the filter cannot read its flags; libc falls back to clone
    code += [(equal, 1, 0, _CLONE[column]), (end, 0, 0, allow)]
    code += [(load, 0, 0, 16), (bits, 0, 1, _CLONE_THREAD), (end, 0, 0, allow), (end, 0, 0, refuse)]
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(buffer)))
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
    """Arguments: descriptors of the program's text, of its input and for reports; four limits; the visible paths."""
    program, stdin, reports, *numbers = map(int, sys.argv[1:8])
    os.set_inheritable(reports, False)

    def report(line: str) -> None:
        os.write(reports, line.encode() + b"\n")

    try:
        texts = [_take(descriptor) for descriptor in (program, stdin)]
        limits = dict(zip(("cpu_s", "memory_mb", "threads", "scratch_mb"), numbers, strict=True))
        guard(*texts, limits, sys.argv[8:], report)
    except Exception as e:
        report(f"problem {e}")


if __name__ == "__main__":
    main()
