"""What programs get from the kernel in the sandbox: nothing that is not theirs, and all that ordinary ones need."""

import contextlib
import errno
import fcntl
import os
import platform
import re
import struct
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from areal_megatron.reward.cgroup import delegated
from areal_megatron.reward.sandbox import Limits, run
from areal_megatron.reward.system_calls import ABSENT, PROBED_FROM, REFUSE
from tests.unit.reward.test_system_calls import MACHINES, answer, listed, ours, seccomp_filter

pytestmark = pytest.mark.usefixtures("isolation")
PRELUDE = """
import ctypes, fcntl, mmap, os, resource, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def map_memory(size, flags, descriptor=-1):
    place = libc.mmap(None, size, 3, flags, descriptor, 0)
    if place == 2**64 - 1:
        raise OSError(ctypes.get_errno(), "mmap")
    return place
"""


def attack(text: str, limits: Limits | None = None) -> str:
    outcome = run(PRELUDE + text, limits=limits or Limits(wall_s=60, memory_mb=256))
    assert outcome.good, outcome
    return outcome.stdout


def test_every_other_call_is_answered_by_the_filter():
    """With arguments for which the kernel itself mostly has other answers."""
    machine = platform.machine()
    code, here = seccomp_filter(machine), MACHINES[machine]
    asked = set(range(512)) - {335, 336}  # uprobes on x86-64, which no filter is asked about, kill who calls them
    refused = [number for number in sorted(asked) if answer(code, here, number, (2**64 - 1,) * 6) in (REFUSE, ABSENT)]
    assert len(refused) > 300
    program = f"for number in {refused}: print(libc.syscall(number, *[ctypes.c_long(-1)] * 6), ctypes.get_errno())"
    answers = [tuple(map(int, line.split())) for line in attack(program).splitlines()]
    expected = [(-1, errno.EPERM if number < PROBED_FROM else errno.ENOSYS) for number in refused]
    probed = set(ours(machine, "rseq 334 293, statx 332 291").values())
    expected = [(-1, errno.ENOSYS) if n in probed else e for n, e in zip(refused, expected, strict=True)]
    assert dict(zip(refused, answers, strict=True)) == dict(zip(refused, expected, strict=True))
    for name in ("bpf", "perf_event_open", "userfaultfd", "ptrace", "io_uring_enter", "vmsplice", "semget", "splice"):
        assert listed(machine)[name] in refused, name


MEMORY = {
    "semaphores": """
while libc.semget(0, 32000, 0o600) >= 0 and held < 400: held += 2
""",
    "pieces of shared memory": """
while held < 400:
    place = map_memory(50 << 20, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    ctypes.memset(place, 1, 50 << 20)
    libc.munmap(place + 4096, (50 << 20) - 4096)
    held += 50
""",
    "pieces of /dev/zero": """
zero = os.open("/dev/zero", os.O_RDWR)
while held < 400:
    place = map_memory(50 << 20, mmap.MAP_SHARED, zero)
    ctypes.memset(place, 1, 50 << 20)
    libc.munmap(place + 4096, (50 << 20) - 4096)
    held += 50
""",
    "pages pinned in pipes": """
pipes = []
while held < 400:
    place = -(-map_memory(64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) // (2 << 20)) * (2 << 20)
    libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(62 << 20), 14)
    ctypes.memset(place, 1, 62 << 20)
    pipes.append(os.pipe())
    for page in range(place, place + (62 << 20), 2 << 20):
        piece = (ctypes.c_size_t * 2)(page, 4096)
        assert libc.vmsplice(pipes[-1][1], piece, 1, 0) == 4096
        held += 2
    libc.munmap(place, 62 << 20)
""",
    "huge pages of the machine": """
try: held = map_memory(2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
except OSError as e: held = e.errno - 1  # there may be none, which is another error
""",
    "large pipes": """
for _ in range(28):
    read, write = os.pipe()
    size = fcntl.fcntl(write, 1031, 1 << 20)
    os.set_blocking(write, False)
    held += os.write(write, bytes(size)) >> 20
""",
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_its_limit_does_not_count_is_refused(name):
    body = textwrap.indent(MEMORY[name], "    ")
    said = attack(f"held = 0\ntry:{body}\nexcept Exception as e: print(e)\nprint(held)")
    assert int(said.splitlines()[-1]) == 0, said


SCATTERED = """
for gigabyte in range(64, 65000):  # each page with page tables of its own
    place = libc.mmap(gigabyte << 30, 4096, 3, 0x100022, -1, 0)
    if place == 2**64 - 1: break
    ctypes.memset(place, 1, 1)
print("all of it")
"""


def test_a_cgroup_counts_what_resource_limits_do_not():
    parent = delegated() or pytest.skip("no cgroup version 2 with memory and pids is delegated to this user")
    limits = Limits(wall_s=60, memory_mb=256)
    assert attack("print(1)", limits) == "1\n"
    outcome = run(PRELUDE + SCATTERED, limits=limits)
    assert (outcome.ended, outcome.status) == ("signal", -9), outcome
    assert not list(parent.glob("areal-sandbox-*"))

    forever = "from areal_megatron.reward.sandbox import run, Limits\nrun('while True: pass', limits=Limits(wall_s=60))"
    worker = subprocess.Popen([sys.executable, "-c", forever])
    while not list(parent.glob(f"areal-sandbox-{worker.pid}-*/memory.max")):
        assert worker.poll() is None
        time.sleep(0.02)
    worker.kill()
    worker.wait()
    time.sleep(1)
    assert list(parent.glob("areal-sandbox-*"))
    subprocess.run([sys.executable, "-c", "from areal_megatron.reward import sandbox\nsandbox.run('')"], check=True)
    assert not list(parent.glob("areal-sandbox-*"))


def test_huge_pages_are_off():
    def status() -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                place = Path("/proc", str(process.pid))
                if "nobody wakes it" in (place / "root/program").read_text():
                    found += [line for line in (place / "status").read_text().splitlines() if "THP_enabled" in line]
        return found

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, "import time\ntime.sleep(3)  # nobody wakes it", limits=Limits(wall_s=30))
        seen = []
        while not running.done():
            seen.append(status())
            time.sleep(0.05)
    assert any("THP_enabled:\t0" in lines for lines in seen), seen  # the others are the sandbox's own processes


@pytest.mark.parametrize("queue", ["libc.sigqueue(os.getpid(), number, 0)", "os.kill(os.getpid(), number)"])
def test_few_signals_wait(queue):
    """Those of all programs of a user count as his, and too many keep him from making a timer."""
    program = f"""
numbers = range(34, 65)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
for _ in range(100):
    for number in numbers: {queue}
time.sleep(1)
"""
    before, most = waiting_signals(), 0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(attack, program)
        while not running.done():
            most = max(most, waiting_signals())
            time.sleep(0.02)
    running.result()
    assert most - before < 200  # 64, and what others do


def waiting_signals() -> int:
    return int(re.search(r"^SigQ:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def test_no_inotify_instance_is_used_up():
    said = attack("made = 0\nwhile made < 200 and libc.inotify_init1(0) >= 0: made += 1\nprint(made)")
    assert said == "0\n"


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_files_of_the_machine_cannot_be_locked(kind):
    program = f"""
with open(os.__file__) as file:
    try: fcntl.{kind}(file, fcntl.LOCK_{"EX" if kind == "flock" else "SH"} | fcntl.LOCK_NB)
    except PermissionError: print("refused")
    else: print("locked")
    time.sleep(1.5)
"""
    locked = []
    with ThreadPoolExecutor(1) as pool, open(os.__file__, "rb") as file:
        running = pool.submit(attack, program)
        while not running.done():
            if kind == "flock":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(file, fcntl.LOCK_UN)
                except BlockingIOError:
                    locked.append(kind)
            else:
                asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                (found,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))
                locked += [kind] * (found != fcntl.F_UNLCK)
            time.sleep(0.02)
    assert running.result() == ("refused\n" if kind == "flock" else "locked\n")  # the second does nothing
    assert not locked


def test_sync_leaves_what_others_have_written_in_memory(tmp_path):
    def unwritten(path: Path) -> bool:
        """Whether the file system has not yet chosen a place on the disk for the file."""
        with path.open("rb") as file:
            asked = bytearray(struct.pack("QQIIII", 0, 2**64 - 1, 0, 0, 1, 0) + bytes(56))
            fcntl.ioctl(file, 0xC020660B, asked)
        return bool(struct.unpack_from("I", asked, 32 + 40)[0] & 4)

    for attempt in range(5):  # the kernel, or another process, may write at the same moment
        path = tmp_path / str(attempt)
        path.write_bytes(bytes(1 << 20))
        try:
            if not unwritten(path):
                pytest.skip(f"{tmp_path} is on a file system that does not delay writing")
        except OSError as e:
            pytest.skip(f"{tmp_path}: {e}")
        attack("os.sync()")
        if unwritten(path):
            attack("os.fsync(os.open(os.__file__, 0)); assert libc.fsync(-1) == libc.syncfs(-1) == 0")
            return
    raise AssertionError("a program can write what others have in memory")


ORDINARY = {
    "input and output": "n = int(input())\nprint(sum(map(int, input().split())) * n)",
    "big output": "print('x' * (5 << 20))",
    "arithmetic": """
import cmath, decimal, fractions, math, random, statistics
random.seed(1)
print(decimal.Decimal(1) / 3, fractions.Fraction(1, 3) + 1, math.comb(50, 25), 7**300 % 1000, statistics.mean([1, 2]))
""",
    "texts and containers": """
import array, bisect, collections, copy, csv, dataclasses, enum, functools, heapq, io, itertools, json, operator, re
import string, struct, textwrap, typing, unicodedata, datetime, calendar, hashlib, base64, pickle, zlib, gzip, logging
heap = [3, 1, 2]; heapq.heapify(heap)
print(heapq.heappop(heap), json.loads('[1]'), re.sub('a+', 'b', 'caat'), collections.Counter('aab'))
print(gzip.decompress(gzip.compress(b'x')), datetime.date(2024, 2, 29), hashlib.sha256(b'').hexdigest()[:4])
print(len(pickle.dumps(1)))
""",
    "recursion": """
import sys, threading, resource
sys.setrecursionlimit(1 << 20)
resource.setrlimit(resource.RLIMIT_STACK, (256 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
threading.stack_size(256 << 20)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
t = threading.Thread(target=lambda: print(depth(100000))); t.start(); t.join()
""",
    "threads": """
import concurrent.futures, queue, threading, time
with concurrent.futures.ThreadPoolExecutor(8) as pool: print(sum(pool.map(lambda x: time.sleep(0.01) or x, range(64))))
q = queue.Queue(); t = threading.Thread(target=lambda: q.put(1)); t.start(); print(q.get(timeout=5)); t.join()
event, condition = threading.Event(), threading.Condition()
print(event.wait(0.01), threading.Lock().acquire(timeout=1))
""",
    "asyncio": """
import asyncio
async def main():
    print(await asyncio.gather(asyncio.sleep(0.01, 1), asyncio.to_thread(sum, [1, 2])))
    a, b = __import__('socket').socketpair(); a.setblocking(False); b.setblocking(False)
    loop = asyncio.get_running_loop(); await loop.sock_sendall(a, b'hi'); print(await loop.sock_recv(b, 9))
asyncio.run(main())
""",
    "signals": """
import signal, time
def ring(*_): raise TimeoutError
signal.signal(signal.SIGALRM, ring)
for set_alarm in (lambda: signal.alarm(1), lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)):
    set_alarm()
    try:
        while True: time.sleep(0.01)
    except TimeoutError: print('rang')
signal.raise_signal(signal.SIGURG); signal.pthread_kill(__import__('threading').get_ident(), signal.SIGURG)
""",
    "files": """
import os, pathlib, shutil, tempfile, time, zipfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / 'a').write_text('1'); shutil.copy2(folder / 'a', folder / 'b'); shutil.copytree(folder, folder / 'c')
os.replace(folder / 'b', folder / 'd'); os.link(folder / 'd', folder / 'e'); os.symlink('e', folder / 'f')
os.chmod(folder / 'e', 0o600); os.utime(folder / 'e', (1, 1)); os.truncate(folder / 'd', 9)
with zipfile.ZipFile(folder / 'z', 'w') as z: z.write(folder / 'e')
with open(folder / 'e', 'r+b', 0) as f: f.write(b'x'); os.fsync(f.fileno()); print(os.pread(f.fileno(), 1, 0))
os.sync()
print(sorted(p.name for p in folder.rglob('*')), shutil.disk_usage('/tmp').total, os.readlink(folder / 'f'))
with tempfile.TemporaryFile() as f: f.write(b'x')
shutil.rmtree(folder); print(os.listdir('.'))
""",
    "maps": """
import mmap, os
with open('f', 'w+b') as f:
    f.write(bytes(8192)); f.flush()
    with mmap.mmap(f.fileno(), 0) as m: m[4096] = 7; m.flush(); m.madvise(mmap.MADV_DONTNEED)
    f.seek(4096); print(f.read(1))
with mmap.mmap(0, 0, access=mmap.ACCESS_READ) as m: print(m.readline())
with mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE) as m: m[0] = 1
""",
    "sqlite3": """
import sqlite3
for kind in ('delete', 'wal'):
    with sqlite3.connect(kind) as db:
        db.execute(f'pragma journal_mode={kind}'); db.execute('create table t (x)')
        db.execute('insert into t values (1)')
    print(sqlite3.connect(kind).execute('select * from t').fetchall())
""",
    "the machine": """
import getpass, locale, os, platform, resource, select, sys, time
print(os.cpu_count() > 0, os.getpid(), os.getuid(), platform.system(), len(os.urandom(4)))
print(resource.getrusage(0).ru_maxrss > 0)
r, w = os.pipe(); os.write(w, b'x'); print(select.select([r], [], [], 1)[0] == [r], os.isatty(0), os.umask(0o22))
p = select.poll(); p.register(r); print(len(p.poll(100))); os.dup2(r, 30); os.close(30); os.set_blocking(r, False)
began = time.perf_counter(); time.sleep(0.02); print(time.perf_counter() - began > 0.019)
print(time.time() > 1e9, os.times().user >= 0)
print(len(os.sched_getaffinity(0)) > 0, os.getgroups() is not None, os.statvfs('/tmp').f_bsize)
""",
    "foreign functions": """
import ctypes
number = ctypes.POINTER(ctypes.c_int)
compare = ctypes.CFUNCTYPE(ctypes.c_int, number, number)(lambda a, b: a[0] - b[0])
numbers = (ctypes.c_int * 3)(3, 1, 2); ctypes.CDLL(None).qsort(numbers, 3, 4, compare); print(list(numbers))
""",
    "memory": """
import gc, tracemalloc, weakref
tracemalloc.start(); data = [bytearray(1 << 20) for _ in range(200)]; del data; gc.collect(); print(sum(range(10**6)))
try: bytearray(1 << 40)
except MemoryError: print('no memory')
""",
    "what is refused cleanly": """
import multiprocessing, os, socket, subprocess, sys, urllib.request
def tried(what):
    try: what()
    except OSError as e: print(type(e).__name__, end=' ')
tried(os.fork); tried(lambda: subprocess.run(['true'])); tried(lambda: os.system('true') == 0 or os.fork())
tried(lambda: multiprocessing.Process(target=print).start()); tried(socket.socket)
tried(lambda: multiprocessing.Pool(1))
tried(lambda: urllib.request.urlopen('http://example.com'))
""",
}
SAID = {
    "input and output": "18\n",
    "big output": "x" * (5 << 20) + "\n",
    "recursion": "100000\n",
    "threads": "2016\n1\nFalse True\n",
    "asyncio": "[1, 3]\nb'hi'\n",
    "signals": "rang\nrang\n",
    "maps": "b'\\x07'\nb'3\\n'\n",
    "sqlite3": "[(1,)]\n[(1,)]\n",
    "foreign functions": "[1, 2, 3]\n",
    "memory": "499999500000\nno memory\n",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_run(name):
    outcome = run(ORDINARY[name], "3\n1 2 3\n", Limits(wall_s=60))
    assert outcome.good, outcome.stderr[-2000:]
    assert outcome.stdout == SAID.get(name, outcome.stdout)
    if name == "what is refused cleanly":
        assert set(outcome.stdout.split()) <= {"PermissionError", "OSError", "URLError", "FileNotFoundError"}
        assert len(outcome.stdout.split()) == 7
