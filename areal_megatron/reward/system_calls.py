"""The system calls that a sandboxed program may make, as a seccomp filter for the kernel.

An allowlist: the calls that Python and its standard library need for a single process with files of its own. All others
never reach the kernel's own code. man pages: seccomp(2), syscalls(2).
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

ALLOW, KILL = 0x7FFF0000, 0x80000000
DONE = 0x00050000
"""The call returns 0 and does nothing."""
REFUSE, ABSENT = DONE | errno.EPERM, DONE | errno.ENOSYS
"""What the filter answers, as SECCOMP_RET_… in linux/seccomp.h."""

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below, and the machine's identifier in linux/audit.h."""

ALLOWED = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, lseek 8 62, open 2 -, openat 257 56, close 3 57, close_range 436 436, dup 32 23,
    dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, truncate 76 45, ftruncate 77 46

    stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48,
    faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
    mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38,
    renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, umask 95 166, utimensat 280 88

    select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
    epoll_pwait 281 22, shutdown 48 210, getsockname 51 204, getpeername 52 205

    execve 59 221, exit 60 93, exit_group 231 94, brk 12 214, munmap 11 215, mremap 25 216, mprotect 10 226,
    set_tid_address 218 96, set_robust_list 273 99, sched_yield 24 124, sched_getaffinity 204 123

    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    sigaltstack 131 132, restart_syscall 219 128, kill 62 129, tgkill 234 131, tkill 200 130, pause 34 -, alarm 37 -,
    getitimer 36 102, setitimer 38 103

    time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, nanosleep 35 101,
    clock_nanosleep 230 115, times 100 153, getrusage 98 165, getrandom 318 278, uname 63 160, sysinfo 99 179

    getpid 39 172, gettid 186 178, getppid 110 173, getpgid 121 155, getpgrp 111 -, getsid 124 156, getuid 102 174,
    geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158
"""
"""Name, and the numbers on both machines."""

NOTHING_TO_DO = """
    sync 162 81, syncfs 306 267, fsync 74 82, fdatasync 75 83, msync 26 227, sync_file_range 277 84,
    listxattr 194 11, llistxattr 195 12, flistxattr 196 13
"""
"""Calls with nothing to do for a program whose files are in memory and have no extended attributes. Done by the kernel,
they would write what others have left in the machine's caches, or wait for a disk."""

PROBED = "rseq 334 293, statx 332 291"
PROBED_FROM = 424
"""C libraries try these calls and all that Linux has had since 5.1, and do without if there are none."""


@dataclass(frozen=True)
class _Argument:
    """A condition on the lower half of an argument, which is all of it for the calls below."""

    index: int
    values: frozenset[int]
    mask: int = 0xFFFFFFFF
    """The bits that must be one of the values."""


def _is(index: int, *values: int, mask: int = 0xFFFFFFFF) -> _Argument:
    return _Argument(index, frozenset(values), mask)


_NOSIGNAL, _DONTWAIT, _PEEK, _WAITALL = 0x4000, 0x40, 2, 0x100
RULES: dict[str, list[tuple[list[_Argument], int]]] = {
    # a thread as glibc starts it, and as musl does; no other flag makes a thread, and no namespace is among them
    "clone 56 220": [([_is(0, 0x003D0F00, 0x007D0F00)], ALLOW)],
    # without huge pages of the machine's pool and memory that stays when it is no longer mapped: of a shared mapping
    # without a file, the kernel frees nothing until all of it is unmapped
    "mmap 9 222": [([_is(3, 0x01, 0x02, 0x22, mask=0x0004002F)], ALLOW)],
    "madvise 28 233": [([_is(2, 0, 1, 2, 3, 4, 8)], ALLOW)],  # NORMAL … DONTNEED, FREE
    # waiting and waking; not the operations that lend priorities
    "futex 202 98": [([_is(1, 0, 1, 3, 4, 5, 9, 10, mask=0xFFFFFE7F)], ALLOW)],
    # duplicates, flags, the size of a pipe, F_GETLK. A single process is never in its own way, so F_SETLK and F_SETLKW
    # are done without locking what others use
    "fcntl 72 25": [([_is(1, 0, 1, 2, 3, 4, 5, 1030, 1032)], ALLOW), ([_is(1, 6, 7)], DONE)],
    # TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    "ioctl 16 29": [([_is(1, 0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)], ALLOW)],
    # streams between its own ends, without options, descriptors inside messages, or data out of band
    "socketpair 53 199": [([_is(0, 1), _is(1, 1, mask=~0x80800 & 0xFFFFFFFF)], ALLOW)],
    "sendto 44 206": [([_is(3, 0, mask=~(_NOSIGNAL | _DONTWAIT) & 0xFFFFFFFF)], ALLOW)],
    "recvfrom 45 207": [([_is(3, 0, mask=~(_PEEK | _DONTWAIT | _WAITALL) & 0xFFFFFFFF)], ALLOW)],
    "getsockopt 55 209": [([_is(1, 1), _is(2, 3, 4, 38, 39)], ALLOW)],  # type, error, protocol, domain
    "prctl 157 167": [([_is(0, 15, 16)], ALLOW)],  # a thread's name
    "arch_prctl 158 -": [([_is(0, 0x1002)], ALLOW)],  # the register of thread-local variables
    "prlimit64 302 261": [([_is(0, 0)], ALLOW)],  # its own
}
"""Name and numbers → cases of conditions that must all hold, and what happens then; refused if no case holds."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _JUMP, _END = 0x20, 0x54, 0x15, 0x35, 0x05, 0x06
_Code = list[tuple[int, int, int, int]]
"""Instructions: operation, how many instructions to skip if true and if false, operand."""


def seccomp_filter(machine: str) -> bytes:
    """Returns the filter as an array of `struct sock_filter`, for a machine as `uname -m` names it.

    Raises ValueError for a machine without a table.
    """
    if machine not in _MACHINES:
        raise ValueError(f"no table of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    column, identifier = _MACHINES[machine]
    segments: list[tuple[int, _Code]] = []
    decided = _decisions(column)
    for number in range(max(PROBED_FROM, *decided) + 2):
        code = decided.get(number, _end(REFUSE if number < PROBED_FROM else ABSENT))
        if not segments or segments[-1][1] != code:
            segments.append((number, code))
    if machine == "x86_64":
        segments.append((0x40000000, _end(KILL)))  # its second numbering, x32
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, identifier), *_end(KILL), (_LOAD, 0, 0, 0), *_search(segments)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def numbers(table: str, column: int) -> dict[str, int]:
    """Returns name → number of the calls in a table that this machine has."""
    rows = (row.split() for row in table.replace("\n\n", ",").split(","))
    return {name: int(found[column]) for name, *found in rows if found[column] != "-"}


def _decisions(column: int) -> dict[int, _Code]:
    """Returns number → code of all calls but those that are answered by their number alone."""
    decided = {}
    for table, action in ((ALLOWED, ALLOW), (NOTHING_TO_DO, DONE), (PROBED, ABSENT)):
        decided |= dict.fromkeys(numbers(table, column).values(), _end(action))
    for call, cases in RULES.items():
        decided |= dict.fromkeys(numbers(call, column).values(), _rule(cases))
    return decided


def _end(action: int) -> _Code:
    return [(_END, 0, 0, action)]


def _rule(cases: list[tuple[list[_Argument], int]]) -> _Code:
    code = _end(REFUSE)
    for conditions, action in reversed(cases):
        case = _end(action)
        for condition in reversed(conditions):
            tests = [(_LOAD, 0, 0, 16 + 8 * condition.index), (_AND, 0, 0, condition.mask)]
            values = sorted(condition.values)
            for left, value in zip(range(len(values) - 1, -1, -1), values, strict=True):
                tests.append((_EQUAL, left, 0 if left else len(case), value))
            case = tests + case
        code = case + code
    return code


def _search(segments: list[tuple[int, _Code]]) -> _Code:
    """Returns code that finds the last segment whose first number is not above the call's."""
    if len(segments) == 1:
        return segments[0][1]
    middle = len(segments) // 2
    below, above = _search(segments[:middle]), _search(segments[middle:])
    # a jump of its own, since a comparison skips at most 255 instructions
    return [(_AT_LEAST, 0, 1, segments[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]
