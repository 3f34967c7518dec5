"""What the kernel offers to keep a process in: namespaces, an empty file system, limits, a filter of system calls.

The functions here act on the process that calls them, and cannot be undone in it. They are for the process in which
programs run, not for the one that searches. Linux only; through the C library, since Python has names for few of them.

Names of an isolation, as results and logs give them:

    namespaces   an empty, read-only file system of its own, without network, other processes, or rights
    bubblewrap   the same by the program of that name, where a user may not make namespaces; Python's own files are seen
    seccomp      a filter that lets through only the system calls of a calculation: no file can be opened, no socket
                 made, no process started or signalled. Alone, or on top of one of the others: `namespaces+seccomp`
    none         limits and a process group only
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

NONE = "none"

# The order in which they are tried: the narrowest first.
ISOLATIONS = ("namespaces+seccomp", "bubblewrap+seccomp", "namespaces", "bubblewrap", "seccomp")

NOBODY = 65534

# <linux/sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>, <linux/seccomp.h>, <linux/audit.h>
_NEW_USER, _NEW_MOUNTS, _NEW_IPC, _NEW_HOST, _NEW_PIDS, _NEW_NETWORK = (
    *(0x10000000, 0x00020000, 0x08000000, 0x04000000, 0x20000000, 0x40000000),
)
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 32, 1 << 14, 1 << 18
_DETACH = 2
_DIE_WITH_PARENT, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_CAPABILITIES_3 = 0x20080522
_FILTER = 2
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

# What a calculation in Python needs, and no more: memory, time, the pipes that it has, signals of its own, an end.
_CALLS = {
    "x86_64": (
        0xC000003E,
        {
            **{"read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10},
            **{
                "munmap": 11,
                "brk": 12,
                "rt_sigaction": 13,
                "rt_sigprocmask": 14,
                "rt_sigreturn": 15,
                "sched_yield": 24,
            },
            **{"mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60, "gettimeofday": 96},
            **{"getrusage": 98, "times": 100, "sigaltstack": 131, "gettid": 186, "futex": 202},
            **{"sched_getaffinity": 204, "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229},
            **{"clock_nanosleep": 230, "exit_group": 231, "getrandom": 318, "rseq": 334},
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            **{"read": 63, "write": 64, "close": 57, "fstat": 80, "ppoll": 73, "lseek": 62, "mmap": 222},
            **{"mprotect": 226, "munmap": 215, "brk": 214, "rt_sigaction": 134, "rt_sigprocmask": 135},
            **{"rt_sigreturn": 139, "sched_yield": 124, "mremap": 216, "madvise": 233, "nanosleep": 101},
            **{"getpid": 172, "exit": 93, "gettimeofday": 169, "getrusage": 165, "times": 153, "sigaltstack": 132},
            **{"gettid": 178, "futex": 98, "sched_getaffinity": 123, "restart_syscall": 128, "clock_gettime": 113},
            **{"clock_getres": 114, "clock_nanosleep": 115, "exit_group": 94, "getrandom": 278, "rseq": 293},
        },
    ),
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def enter_namespaces() -> None:
    """Go on as the first process of namespaces of one's own, without rights, in an empty file system.

    The process that calls this waits for the one that returns, and ends as it does. Everything that is needed of the
    file system must have been loaded before.

    Raises:
        OSError: the kernel, or a container around this process, does not allow it. The process is then of no use.
    """
    kinds = _NEW_MOUNTS | _NEW_IPC | _NEW_HOST | _NEW_PIDS | _NEW_NETWORK
    user, group = os.geteuid(), os.getegid()
    rooted = user == 0
    try:
        # Real root needs no user namespace, and can become somebody else inside. Within a user namespace of root it
        # would stay root for the kernel, which does not count root's processes.
        _call("unshare", kinds if rooted else kinds | _NEW_USER)
    except OSError:
        if not rooted:
            raise
        rooted = False
        _call("unshare", kinds | _NEW_USER)
    if not rooted:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")

    inner = os.fork()  # a process namespace begins with the next process
    if inner:
        _end_like(inner)
    _empty_file_system()
    if rooted:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    give_up_rights()
    die_with_parent(0)  # it is in another namespace, where its number says nothing


def give_up_rights() -> None:
    """Hold no capability, gain none, and be no debugger's prey."""
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends. A change of user undoes it.

    Args:
        parent: who that should be; where it has ended already, so does this process.
    """
    if sys.platform == "linux":
        _call("prctl", _DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def become_subreaper() -> None:
    """Be the parent of all descendants whose own parents end, so that they can be found and killed."""
    if sys.platform == "linux":
        _call("prctl", _SUBREAPER, 1, 0, 0, 0)


def kill_others(first: int) -> None:
    """Kill and reap everything that this process has started, whatever group or session it moved to.

    Args:
        first: a child that leads a process group.
    """
    if os.getpid() == 1:  # the namespace's first process: all others are descendants
        _kill(os.kill, -1)
        _reap()
        return
    if first <= 1:  # to the kernel 0, 1 and negative numbers mean others than a child
        raise ValueError(f"{first} is no child")
    _kill(os.killpg, first)
    _kill(os.kill, first)
    # Killing a process hands its children to the subreaper, so that they show up in the next round.
    while found := _children():
        for child in found:
            _kill(os.kill, child)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
    _reap()


def limit_resources(*, cpu_seconds: int, address_bytes: int, open_files: int, processes: int) -> None:
    """Limits of this process that the kernel keeps, also for what it starts.

    Args:
        cpu_seconds: processor time.
        address_bytes: of address space, with what this process has already.
        open_files: that it may have at once.
        processes: see `limit_processes`.
    """
    _limit(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    _limit(resource.RLIMIT_AS, address_bytes)
    _limit(resource.RLIMIT_NOFILE, open_files)
    _limit(resource.RLIMIT_FSIZE, 0)  # no file grows; pipes do not count
    _limit(resource.RLIMIT_CORE, 0)
    limit_processes(processes)


def limit_processes(processes: int) -> None:
    """Let this process start others, or threads, only while its user has fewer than so many; the kernel spares root."""
    _limit(resource.RLIMIT_NPROC, processes)


def all_limits() -> dict[str, tuple[int, int]]:
    """The limits that this process is under, by their names."""
    return {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}


def address_space() -> int:
    """Bytes of address space of this process; where the kernel does not tell, more than Python and numpy take."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def filter_calls() -> None:
    """Let this process make only the system calls of a calculation from here on; all others fail with EPERM.

    Raises:
        OSError: the kernel has no filters, or the calls of this kind of processor are not known here.
    """
    machine = platform.machine()
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"no list of system calls for {machine}")
    architecture, calls = _CALLS[machine]
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    numbers = sorted(calls.values())
    lines = [
        (load, 0, 0, 4),  # the architecture, since numbers mean other calls on another
        (equal, 1, 0, architecture),
        (give, 0, 0, _KILL),
        (load, 0, 0, 0),  # the number
        *((equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (give, 0, 0, _FAIL | errno.EPERM),
        (give, 0, 0, _ALLOW),
    ]
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", _SECCOMP, _FILTER, ctypes.byref(_Program(len(lines), instructions)), 0, 0)


def bubblewrap(command: Sequence[str], see: Sequence[str | Path]) -> list[str] | None:
    """The command that runs another one under bubblewrap, or None where that is not installed.

    Args:
        command: what to run.
        see: files and folders that it can read, beside the system's libraries.
    """
    program = shutil.which("bwrap")
    if program is None:
        return None
    options = ["--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    for folder in ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store", "/gnu/store"):
        if os.path.islink(folder):
            options += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            options += ["--ro-bind", folder, folder]
    for path in see:
        options += ["--ro-bind", str(path), str(path)]
    return [program, *options, "--remount-ro", "/", "--", *command]


def _empty_file_system() -> None:
    """Stand in an empty, read-only file system, and let go of the one before."""
    _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)  # nothing of this shows outside
    place = next(folder for folder in ("/tmp", "/mnt", "/proc", "/") if os.path.isdir(folder)).encode()
    plain = _NO_SETUID | _NO_DEVICES | _NO_EXEC
    _call("mount", b"nothing", place, b"tmpfs", plain, b"size=4k,nr_inodes=2,mode=555")
    os.chdir(place)
    _call("pivot_root", b".", b".")  # the old root comes to lie on top of the new one
    _call("umount2", b".", _DETACH)
    os.chdir("/")
    _call("mount", None, b"/", None, _REMOUNT | _READ_ONLY | plain, None)


def _call(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if name == "prctl":  # its parameters are longs, and variadic ones would be passed as ints
        arguments = tuple(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments)
    if name == "mount":
        arguments = (*arguments[:3], ctypes.c_ulong(arguments[3]), arguments[4])
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _end_like(child: int) -> None:
    """Wait for a child, and end as it did."""
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    hard = soft if hard is None else hard
    highest = resource.getrlimit(which)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(which, (soft, hard))


def _kill(function: Any, target: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone, or no longer ours
        function(target, signal.SIGKILL)


def _reap() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _children() -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []
