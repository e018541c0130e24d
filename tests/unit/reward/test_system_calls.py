"""The filter of system calls: its numbers against the kernel's headers, its instructions as the kernel reads them."""

import re
import struct
from pathlib import Path

import pytest

from areal_megatron.reward.system_calls import (
    ABSENT,
    ALLOW,
    ALLOWED,
    DONE,
    KILL,
    NOTHING_TO_DO,
    PROBED,
    PROBED_FROM,
    REFUSE,
    RULES,
    numbers,
    seccomp_filter,
)

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
OTHERS = {"i386": 0x40000003, "arm": 0x40000028, "riscv64": 0xC00000F3, "ppc64le": 0xC0000015}
HEADERS = {
    "x86_64": [*Path("/usr/include").glob("x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    "aarch64": [Path("/usr/include/asm-generic/unistd.h")],
}
"""Where Debian and others keep the kernel's lists; that of aarch64 is the generic one."""

RISKY = """
    acct add_key adjtimex bpf capset chroot clock_adjtime clock_settime clone3 delete_module execveat fanotify_init
    fanotify_mark finit_module flock fsconfig fsmount fsopen fspick get_mempolicy init_module inotify_add_watch
    inotify_init1 io_cancel io_destroy io_getevents io_setup io_submit io_uring_enter io_uring_register io_uring_setup
    ioprio_set kcmp kexec_load keyctl landlock_create_ruleset lookup_dcookie mbind membarrier memfd_create memfd_secret
    migrate_pages mincore mlock mlock2 mlockall mknodat mount mount_setattr move_mount move_pages mq_open msgget msgsnd
    name_to_handle_at open_by_handle_at open_tree perf_event_open personality pidfd_getfd pidfd_open pidfd_send_signal
    pivot_root pkey_alloc process_madvise process_vm_readv process_vm_writev ptrace quotactl readahead reboot
    remap_file_pages request_key rt_sigqueueinfo rt_tgsigqueueinfo sched_setaffinity sched_setattr sched_setscheduler
    seccomp semget semop semtimedop sendfile sendmmsg sendmsg set_mempolicy setdomainname sethostname setns setpriority
    setresuid setsockopt settimeofday setxattr shmat shmget signalfd4 socket splice swapon syslog tee timer_create
    timerfd_create umount2 unshare userfaultfd vhangup vmsplice
"""

FORK, THREAD = 0x01200011, 0x003D0F00
SAMPLES = {
    "clone": [
        ((THREAD,), ALLOW),
        ((THREAD | 0x400000,), ALLOW),
        ((FORK,), REFUSE),
        ((0x4111,), REFUSE),
        ((0,), REFUSE),
        *(((THREAD | new,), REFUSE) for new in (0x20000, 0x2000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)),
        ((THREAD | 0x1000,), REFUSE),  # with a descriptor
        ((THREAD | 0x2000,), REFUSE),  # traced
    ],
    "mmap": [
        ((0, 4096, 3, 0x22), ALLOW),
        ((0, 4096, 3, 0x20022), ALLOW),
        ((0, 4096, 5, 0x812), ALLOW),
        ((0, 4096, 1, 0x1, 3), ALLOW),
        ((0, 4096, 3, 0x21), REFUSE),  # shared without a file
        ((0, 4096, 3, 0x40022), REFUSE),  # huge pages
        ((0, 4096, 3, 0x3, 3), REFUSE),
        ((0, 4096, 3, 0x28), REFUSE),
    ],
    "madvise": [((0, 0, 4), ALLOW), ((0, 0, 14), REFUSE), ((0, 0, 12), REFUSE), ((0, 0, 100), REFUSE)],
    "futex": [
        *(((0, op), ALLOW) for op in (0, 1, 0x80, 0x81, 0x189, 0x109, 0x8A, 0x83, 0x84, 0x85)),
        *(((0, op), REFUSE) for op in (6, 0x86, 7, 8, 11, 12, 13, 2, 0x200)),
    ],
    "fcntl": [
        *(((1, command), ALLOW) for command in (0, 1, 2, 3, 4, 5, 1030)),
        *(((1, command), DONE) for command in (6, 7)),
        # owners, signals, open file description locks, leases, notification, size of a pipe, seals
        *(((1, command), REFUSE) for command in (8, 10, 15, 36, 37, 38, 1024, 1025, 1026, 1031, 1033, 1035)),
    ],
    "ioctl": [
        *(((0, request), ALLOW) for request in (0x5401, 0x5413, 0x5421, 0x5451)),
        *(((0, request), REFUSE) for request in (0x5412, 0x541C, 0x5423, 0x5203, 0x40049409, 0xC020660B, 0)),
    ],
    "socketpair": [
        ((1, 1), ALLOW),
        ((1, 0x80001), ALLOW),
        ((1, 0x80801), ALLOW),
        ((1, 2), REFUSE),
        ((1, 5), REFUSE),
        ((2, 1), REFUSE),
        ((16, 3), REFUSE),
    ],
    "sendto": [((3, 0, 1, 0), ALLOW), ((3, 0, 1, 0x4040), ALLOW), ((3, 0, 1, 1), REFUSE), ((3, 0, 1, 1 << 26), REFUSE)],
    "recvfrom": [((3, 0, 1, 0), ALLOW), ((3, 0, 1, 0x142), ALLOW), ((3, 0, 1, 1), REFUSE)],
    "getsockopt": [((3, 1, 3), ALLOW), ((3, 1, 59), REFUSE), ((3, 0, 3), REFUSE), ((3, 6, 4), REFUSE)],
    "prctl": [
        ((15,), ALLOW),
        *(((option,), REFUSE) for option in (1, 4, 8, 22, 23, 28, 35, 38, 41, 52, 67, 0x59616D61)),
    ],
    "arch_prctl": [((0x1002,), ALLOW), *(((code,), REFUSE) for code in (0x1001, 0x1004, 0x1012, 0x1022, 0x5001))],
    "prlimit64": [((0, 7), ALLOW), ((1, 7), REFUSE), ((0xFFFFFFFF, 7), REFUSE)],
}
"""Call → arguments, the rest of which are 0, and the filter's answer."""


def answer(code: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Runs a filter as the kernel does, on `struct seccomp_data`."""
    data = struct.pack("<IIQ6Q", number, architecture, 0x7FFF12345678, *arguments, *[0] * (6 - len(arguments)))
    value, at = 0, 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        match operation:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                value &= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {at - 1} is {operation:#x}")


def listed(machine: str) -> dict[str, int]:
    """Name → number as the kernel's header has them."""
    header = next((path for path in HEADERS[machine] if path.exists()), None)
    if header is None:
        pytest.skip(f"no kernel headers (linux-libc-dev): {HEADERS[machine][0]}")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)
    names = {name: int(number) for name, number in found}
    return names | ({"newfstatat": names["fstatat"]} if machine == "aarch64" else {})


def ours(machine: str, *tables: str) -> dict[str, int]:
    column = list(MACHINES).index(machine)
    return {name: number for table in tables for name, number in numbers(table, column).items()}


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernel(machine):
    known = listed(machine)
    found = ours(machine, ALLOWED, NOTHING_TO_DO, PROBED, *RULES)
    assert found == {name: known.get(name) for name in found}
    # and where there is none on this machine, there is none
    everywhere = {name for other in MACHINES for name in ours(other, ALLOWED, NOTHING_TO_DO, PROBED, *RULES)}
    assert not [name for name in everywhere - set(found) if name in known]
    # a name stands in one table only
    assert len(found) == sum(len(ours(machine, table)) for table in (ALLOWED, NOTHING_TO_DO, PROBED, *RULES))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_is_answered_by_the_table(machine):
    code, here = seccomp_filter(machine), MACHINES[machine]
    expected = {number: REFUSE if number < PROBED_FROM else ABSENT for number in range(1024)}
    for table, action in ((ALLOWED, ALLOW), (NOTHING_TO_DO, DONE), (PROBED, ABSENT)):
        expected |= dict.fromkeys(ours(machine, table).values(), action)
    ruled = ours(machine, *RULES)
    for number in set(expected) - set(ruled.values()):
        for arguments in ((), (0xFFFFFFFFFFFFFFFF,) * 6, (1,) * 6, (THREAD,)):
            assert answer(code, here, number, arguments) == expected[number], (number, arguments)
    for name, number in ruled.items():
        for arguments, action in SAMPLES[name]:
            assert answer(code, here, number, arguments) == action, (name, arguments)
    assert set(SAMPLES) == {name for other in MACHINES for name in ours(other, *RULES)}


@pytest.mark.parametrize("machine", MACHINES)
def test_no_risky_call_is_allowed(machine):
    code, known = seccomp_filter(machine), listed(machine)
    risky = {name: known[name] for name in RISKY.split() if name in known}
    assert len(risky) > 100
    for name, number in risky.items():
        for arguments in ((), (1,) * 6, (0xFFFFFFFF,) * 6):
            assert answer(code, MACHINES[machine], number, arguments) in (REFUSE, ABSENT), name


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_numbering_end_the_program(machine):
    code = seccomp_filter(machine)
    for number in range(512):
        for other in (set(MACHINES.values()) | set(OTHERS.values())) - {MACHINES[machine]}:
            assert answer(code, other, number) == KILL
        second = KILL if machine == "x86_64" else ABSENT
        assert answer(code, MACHINES[machine], 0x40000000 | number) == second
        assert answer(code, MACHINES[machine], 0xFFFFFFFF - number) == second


def test_a_machine_without_a_table_has_no_filter():
    with pytest.raises(ValueError, match="no table of system calls for riscv64, only for x86_64 and aarch64"):
        seccomp_filter("riscv64")
