"""More than a hundred programs that no sandbox should let through, as texts.

Each prints "began" and, if it got what it was after, "ESCAPED". Names in capitals are what it attacks outside; they are
put before it as constants, see tests/processes/reward/test_sandbox.py.
"""

PRELUDE = """
import ctypes, fcntl, glob, mmap, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def call(name, *words):
    if getattr(libc, name)(*[ctypes.c_long(w) if isinstance(w, int) else w for w in words]) < 0:
        raise OSError(ctypes.get_errno(), name)
    return True

def must(condition):
    assert condition
    return condition

def read(path):
    with open(path, "rb") as file:
        return must(file.read(4096))

def write(path):
    with open(path, "wb") as file:
        return must(file.write(b"ESCAPED"))

def ask(family, kind, address):
    with socket.socket(family, kind) as s:
        s.settimeout(0.3)
        s.connect(address)
        return must(s.send(b"ESCAPED"))

def is_open(descriptor):
    try: return bool(os.fstat(descriptor))
    except OSError: return False

def ignore_signals():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)

def forever():
    while True:
        time.sleep(1)

print("began", flush=True)
"""

REFUSED = {
    # more processes
    "fork": "os.fork() or True",
    "forkpty": "os.forkpty()",
    "posix_spawn": "os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "subprocess": "__import__('subprocess').run([sys.executable, '-c', ''], check=True)",
    "shell": "must(os.system('exit 0') == 0)",
    "multiprocessing": "__import__('multiprocessing').get_context('fork').Process(target=print).start() or True",
    "clone as a number": "call('syscall', 56 if X86 else 220, signal.SIGCHLD, 0, 0, 0, 0)",
    "vfork as a number": "call('syscall', 58 if X86 else 220, 0x4111, 0, 0, 0, 0)",
    "clone3": "call('syscall', 435, bytes(88), 88)",
    "fork by the x32 numbers": "call('syscall', 57 | 0x40000000)",
    # files
    "read a file outside": "read(SECRET_FILE)",
    "read through a symlink": "os.symlink(SECRET_FILE, 'link') or read('link')",
    "read through dots": "read('/tmp' + '/..' * 40 + SECRET_FILE)",
    "read through the root of process 1": "read('/proc/1/root' + SECRET_FILE)",
    "hard link": "os.link(SECRET_FILE, 'link') or read('link')",
    "environment of the parent": "read(f'/proc/{PARENT}/environ')",
    "environment that it was given": "must(TOKEN in str(os.environ))",
    "environment of process 1": "read('/proc/1/environ')",
    "memory of the parent": "open(f'/proc/{PARENT}/mem', 'rb')",
    "password hashes": "read('/etc/shadow')",
    "users": "read('/etc/passwd')",
    "keys for ssh": "must(glob.glob('/root/.ssh') + glob.glob('/home/*/.ssh'))",
    "shell history": "must(glob.glob('/root/.*history') + glob.glob('/home/*/.*history'))",
    "list the root": "must({'etc', 'proc', 'home'} <= set(os.listdir('/')))",
    "write a file outside": "write(FOLDER + '/new')",
    "write over a file outside": "write(SECRET_FILE)",
    "write into shared memory": "write('/dev/shm/' + TOKEN)",
    "write into the root": "write('/new')",
    "write over its own text": "write('/program')",
    "write into the Python installation": "write(os.__file__)",
    "write beside the libraries": "write('/usr/lib/' + TOKEN)",
    "write through descriptor of a read-only folder": (
        "os.open(TOKEN, os.O_CREAT | os.O_WRONLY, dir_fd=os.open('/usr/lib', 0))"
    ),
    "make a device": "os.mknod('disk', 0o60600, os.makedev(254, 0))",
    "read a disk": "read(must(glob.glob('/dev/[vsn][dv]*'))[0])",
    "kernel messages": "read('/dev/kmsg')",
    "kernel messages by call": "call('klogctl', 3, ctypes.create_string_buffer(4096), 4096)",
    "kernel settings": "open('/proc/sys/kernel/hostname', 'w')",
    "kernel settings by sysfs": "must(os.listdir('/sys'))",
    "open by handle": "call('syscall', 304 if X86 else 265, -100, bytes(136), 0)",
    "chroot": "os.chroot('/tmp')",
    "pivot_root": "call('pivot_root', b'/tmp', b'/tmp')",
    "mount proc": "os.mkdir('p') or call('mount', b'proc', b'p', b'proc', 0, None)",
    "mount over the root": "call('mount', b'none', b'/', b'tmpfs', 0, None)",
    "make the root writable": "call('mount', None, b'/', None, 32 | 4096, None)",
    "unmount the scratch folder": "call('umount2', b'/tmp', 2)",
    "open a new file system": "call('syscall', 430, b'tmpfs', 0)",
    "inherited descriptors": "must([d for d in range(3, 1024) if is_open(d)])",
    # privileges
    "become root": "os.setuid(0)",
    "become another user": "os.setresuid(65534, 65534, 65534)",
    "become another group": "os.setgroups([0]) or os.setgid(0)",
    "take capabilities": (
        "call('capset', (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6))"
    ),
    "new user namespace": "call('unshare', 0x10000000)",
    "new mount namespace": "call('unshare', 0x20000)",
    "new user namespace by a thread": "call('syscall', 56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "enter the namespace of process 1": "call('setns', os.pidfd_open(1), 0x20000)",
    "raise a hard limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "raise the number of threads": "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "higher priority": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "host name": "socket.sethostname('ESCAPED')",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "reboot": "call('syscall', 169 if X86 else 142, 0xFEE1DEAD, 0x28121969, 0x89ABCDEF, 0)",
    "load a kernel module": "call('syscall', 175 if X86 else 105, bytes(64), 64, b'')",
    "swap": "call('swapon', b'/tmp', 0)",
    "keyring": "call('syscall', 250 if X86 else 219, 0, -3, 0)",
    "kernel programs": "call('syscall', 321 if X86 else 280, 5, bytes(128), 128)",
    # other processes
    "trace process 1": "call('ptrace', 16, 1, None, None)",
    "trace the parent": "call('ptrace', 16, PARENT, None, None)",
    "take a descriptor of process 1": "call('syscall', 438, os.pidfd_open(1), 0, 0)",
    "signal another process": "os.kill(VICTIM, signal.SIGKILL) or True",
    "signal another group": "os.killpg(VICTIM, signal.SIGKILL) or True",
    "signal the parent": "os.kill(PARENT, 0) or True",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGKILL) or True",
    "limit another process": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (0, 0))",
    "type into the terminal": "[fcntl.ioctl(d, 0x5412, b'x') for d in (0, 1, 2)]",
    "terminal": "open('/dev/tty')",
    # network
    "connect": "ask(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', TCP))",
    "datagram": "ask(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', UDP))",
    "IPv6": "ask(socket.AF_INET6, socket.SOCK_DGRAM, ('::1', UDP))",
    "Unix socket": "ask(socket.AF_UNIX, socket.SOCK_STREAM, UNIX)",
    "abstract Unix socket": "ask(socket.AF_UNIX, socket.SOCK_STREAM, '\\0' + TOKEN)",
    "bind": "socket.create_server(('0.0.0.0', 0))",
    "raw socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "to the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "name lookup": "must(socket.getaddrinfo('example.com', 80))",
    # memory that belongs to nobody
    "memory file": "os.memfd_create('hidden')",
    "shared memory segment": "call('shmget', 0, 1 << 30, 0o1600)",
    "message queue": "call('msgget', 0, 0o1600)",
    "semaphores": "call('semget', 0, 32000, 0o1600)",
    "pages in a pipe": "call('vmsplice', os.pipe()[1], (ctypes.c_size_t * 2)(id(libc) // 4096 * 4096, 4096), 1, 0)",
    "a map that outlives its pages": "mmap.mmap(-1, 1 << 20)",
    "a device of such maps": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 1 << 20)",
    # what all programs of a user share
    "inotify": "call('inotify_init1', 0)",
    "queue a signal": "call('sigqueue', os.getpid(), signal.SIGURG, 0)",
    "timer": "call('timer_create', 0, None, ctypes.create_string_buffer(8))",
    "contexts of asynchronous input": "call('syscall', 206 if X86 else 0, 1, ctypes.create_string_buffer(8))",
    "lock a file of the machine": "fcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB) or True",
    "lease on a file of the machine": "fcntl.fcntl(open(os.__file__), 1024, fcntl.F_RDLCK) == 0",
    "notification of changes": "fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1) == 0",
    "descriptors in a message": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "lock memory": "call('mlockall', 1)",
}
"""Name → expression that must raise."""

TEXTS = {
    "fork bomb": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb that counts": """
made = 0
for _ in range(10000):
    try: made += os.fork() == 0
    except OSError: pass
if made: print("ESCAPED")
""",
    "daemon by double fork": """
try:
    if os.fork() == 0 and os.setsid() and os.fork() == 0: print("ESCAPED"), forever()
except OSError: print("refused")
""",
    "thread bomb": """
def more():
    while True:
        try: threading.Thread(target=more).start()
        except RuntimeError: time.sleep(0.01)
threading.stack_size(32768)
more()
""",
    "program that starts itself for ever": "os.execv(sys.executable, [sys.executable, '-S', '/program'])",
    "memory by bytes": "data = []\nwhile True: data.append(bytearray(1 << 24))",
    "memory by doubling": "data = 'x'\nwhile True: data += data",
    "memory by small objects": "data = []\nwhile True: data.append([data])",
    "memory by a map that is shared": (
        "maps = []\nwhile True:\n    maps.append(mmap.mmap(-1, 1 << 26)); maps[-1].write(bytes(1 << 26))"
    ),
    "memory that is caught and tried again": """
data = []
while True:
    try: data.append(bytearray(1 << 20))
    except MemoryError: pass
""",
    "memory in threads": """
def hold():
    data = []
    while True: data.append(bytearray(1 << 22))
for _ in range(8): threading.Thread(target=hold).start()
""",
    "deep recursion": "sys.setrecursionlimit(1 << 30)\ndef deeper(): return [deeper()]\ndeeper()",
    "number that never ends": "x = 7\nwhile True: x *= x",
    "memory in pipes": """
ends = []
while True:
    ends.append(os.pipe())
    fcntl.fcntl(ends[-1][1], 1031, 1 << 20)
    os.set_blocking(ends[-1][1], False)
    os.write(ends[-1][1], bytes(1 << 20))
""",
    "memory in socket pairs": """
ends = []
while True:
    ends.append(socket.socketpair())
    ends[-1][0].setblocking(False)
    ends[-1][0].send(bytes(1 << 18))
""",
    "make the folder that it is after": "os.makedirs(FOLDER)\nwith open(FOLDER + '/new', 'w') as f: f.write('x')",
    "fill the scratch folder": "with open('f', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
    "fill it with many files": "for i in range(1 << 20):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))",
    "fill it with empty files": "for i in range(1 << 20): os.mkdir(str(i))",
    "file of a size that is not there": "os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 50)\nprint('ESCAPED')",
    "endless output": "while True: print('x' * 65536)",
    "endless output without a line": "while True: os.write(1, b'x')",
    "endless errors": "while True: sys.stderr.write('x' * 65536)",
    "endless output on both": "while True: os.write(1, bytes(65536)); os.write(2, bytes(65536))",
    "endless output from threads": """
def shout():
    while True: os.write(1, b'\\xff' * 65536)
for _ in range(8): threading.Thread(target=shout).start()
""",
    "output that is no text": "os.write(1, bytes(range(256)) * 64 + b'\\xf0\\x9f')",
    "errors that are huge": "sys.stderr.write('x' * (1 << 24))",
    "sleep for ever": "forever()",
    "sleep and ignore every signal": "ignore_signals()\nforever()",
    "compute for ever": "while True: pass",
    "compute and ignore the CPU limit": "ignore_signals()\nwhile True: pass",
    "compute in one C call": "import re\nre.match('(a*)*b', 'a' * 64)",
    "compute in threads": "for _ in range(8): threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    "read for ever": "z = open('/dev/urandom', 'rb', buffering=0)\nwhile True: z.read(1 << 20)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "deadlock": "lock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "exit that hangs": "import atexit\natexit.register(forever)\nsys.exit(0)",
    "exit with a thread that stays": "threading.Thread(target=forever).start()\nsys.exit(0)",
    "exit in a destructor": "class X:\n    def __del__(self): forever()\nx = X()",
    "close all descriptors and stay": "sys.stdout.flush(); os.closerange(0, 1024)\nforever()",
    "close its output and compute": "os.close(1); os.close(2)\nwhile True: pass",
    "shut its parent's pipes by reading them": "print(os.read(0, 4096))\nos.read(1, 1)",
    "leave its parent's care": (
        "libc.prctl(1, 0, 0, 0, 0)\nos.setpgid(0, 0) if os.getsid(0) != os.getpid() else None\nforever()"
    ),
    "read memory of process 1": """
place = ctypes.create_string_buffer(8)
piece = (ctypes.c_size_t * 2)(ctypes.addressof(place), 8)
try: call("process_vm_readv", 1, piece, 1, piece, 1, 0)
except OSError as e: print("refused" if e.errno == 1 else "ESCAPED", e)
else: print("ESCAPED")
""",
    "kill process 1": "for n in set(signal.Signals): os.kill(1, n)\nforever()",
    "stop process 1": "os.kill(1, signal.SIGSTOP)\nforever()",
    "kill everything": "ignore_signals()\nos.kill(-1, signal.SIGKILL)",
    "kill its group": "os.kill(0, signal.SIGKILL)",
    "kill every number": """
for pid in range(3, 70000):
    try: os.kill(pid, signal.SIGKILL)
    except ProcessLookupError: pass
    except PermissionError: print("ESCAPED")
""",
    "limit process 1": "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))\nforever()",
    "crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "system calls of another kind": """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b802000000cd80c3') if X86 else b'\\0' * 4)  # mov eax, 2 (fork); int 0x80; ret
if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() > 0: print("ESCAPED")
""",
    "numbers of all system calls": """
for number in range(512):
    if number not in (15, 34, 35, 60, 61, 231, 232, 270, 271, 281, 139, 93, 94, 73, 72, 133, 134, 335, 336):
        libc.syscall(number, -1, -1, -1, -1, -1, -1)
""",
}
"""Name → statements."""

PROGRAMS = {
    name: f"""
try:
    value = {expression}
except BaseException as e:
    print("refused:", type(e).__name__, e)
else:
    print("ESCAPED", value, flush=True)
"""
    for name, expression in REFUSED.items()
} | TEXTS

HARMLESS = [
    "fork",
    "posix_spawn",
    "subprocess",
    "shell",
    "multiprocessing",
    "clone as a number",
    "read a file outside",
    "read through a symlink",
    "read through dots",
    "hard link",
    "environment of the parent",
    "environment that it was given",
    "users",
    "list the root",
    "write a file outside",
    "write into shared memory",
    "kernel settings by sysfs",
    "signal another process",
    "signal another group",
    "signal by descriptor",
    "connect",
    "datagram",
    "Unix socket",
    "abstract Unix socket",
    "signal the parent",
    "bind",
    "memory file",
    "message queue",
]
"""Those that do escape without a sandbox, and may be let loose in a test."""

WITHOUT_NAMESPACES = """
import ctypes, os
from pathlib import Path
user, group = os.geteuid(), os.getegid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    Path("/proc/self", name).write_text(text)
Path("/proc/sys/user/max_user_namespaces").write_text("0")
"""
"""Makes this process one of a machine whose administrator forbids user namespaces."""
