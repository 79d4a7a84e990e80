"""What hostile code tries, harmlessly: each attempt stops at the point where it would have worked.

Runs inside a sandbox (where all must fail) and, as root in a throw-away process, on the host (to show that each
could have worked). Prints one JSON object: attempt -> "worked" or the error's name.
"""

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000


def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def in_child(work):
    """For attempts that change the process that makes them."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(abs(code), "in a child")


def open_to_write(path):
    return lambda: os.close(os.open(path, os.O_WRONLY))


def open_to_read(path):
    return lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


def read_something(path):
    """Opening is not enough: a covered file opens, and is empty."""

    def work():
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not os.read(fd, 1):
                raise OSError(errno.ENODATA, "covered")
        finally:
            os.close(fd)

    return work


def mount_here():
    def work():
        libc.unshare(CLONE_NEWNS)
        checked(libc.mount(b"none", b"/", b"", (1 << 18) | 16384, None))
        checked(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))

    in_child(work)


def unmount_sys():
    in_child(lambda: checked(libc.umount2(b"/proc/sys", 2)))


def make_device():
    path = f"{sys.argv[1]}/device"
    try:
        os.mknod(path, 0o60600, os.makedev(7, 200))
    finally:
        if os.path.lexists(path):
            os.unlink(path)


def add_key():
    checked(libc.syscall(248, b"user", b"rollout-test", b"x", 1, -1))


def trace():
    in_child(lambda: checked(libc.ptrace(0, 0, 0, 0)))


def call(number, *args):
    return lambda: in_child(lambda: checked(libc.syscall(number, *args)))


def clone_user():
    pid = libc.syscall(56, CLONE_NEWUSER | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    checked(pid)
    os.waitpid(pid, 0)


def abstract(name):
    def work():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + name)

    return work


def connect(host, port):
    def work():
        with socket.create_connection((host, port), timeout=2):
            pass

    return work


def docker_socket():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("/var/run/docker.sock")


def bpf():
    """Makes a small array map."""
    checked(libc.syscall(321, 0, (ctypes.c_uint32 * 32)(2, 4, 8, 1), 72))


def read_another():
    empty = (ctypes.c_size_t * 2)()
    in_child(lambda: checked(libc.syscall(310, os.getppid(), empty, 0, empty, 0, 0)))


def push_input():
    """Pretends that the user typed something at the terminal."""
    _leader, follower = os.openpty()

    def work():
        os.setsid()
        import fcntl

        fcntl.ioctl(follower, 0x540E, 0)
        fcntl.ioctl(follower, 0x5412, b"x")

    in_child(work)


def setuid_file():
    """Root makes a setuid program, another user starts it."""
    path = f"{sys.argv[1]}/setuid"
    try:
        subprocess.run(["cp", "/usr/bin/id", path], check=True)
        os.chmod(path, 0o4755)

        def work():
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
            if subprocess.run([path, "-u"], capture_output=True).stdout != b"0\n":
                raise OSError(errno.EPERM, "no gain")

        in_child(work)
    finally:
        if os.path.exists(path):
            os.unlink(path)


PORT, ABSTRACT = int(sys.argv[2]), sys.argv[3]

ATTEMPTS = {
    "write core_pattern": open_to_write("/proc/sys/kernel/core_pattern"),
    "write pid_max": open_to_write("/proc/sys/kernel/pid_max"),
    "write drop_caches": open_to_write("/proc/sys/vm/drop_caches"),
    "write sysrq": open_to_write("/proc/sysrq-trigger"),
    "write ip_forward": open_to_write("/proc/sys/net/ipv4/ip_forward"),
    "read kcore": open_to_read("/proc/kcore"),
    "read kmsg": open_to_read("/proc/kmsg"),
    "read keys": read_something("/proc/keys"),
    "read timer_list": read_something("/proc/timer_list"),
    "read interrupts": read_something("/proc/interrupts"),
    "open disk": open_to_read("/dev/vda") if os.path.exists("/dev/vda") else open_to_read("/dev/kmsg"),
    "open kmsg": open_to_write("/dev/kmsg"),
    "make a device": make_device,
    "mount": mount_here,
    "unmount": unmount_sys if len(sys.argv) > 4 else mount_here,
    "keys": add_key,
    "ptrace": trace,
    "user namespace": call(272, CLONE_NEWUSER),
    "clone user namespace": clone_user,
    "open tree": call(428, -100, b"/", 1),
    "bpf": bpf,
    "read memory of another": read_another,
    "type for the user": push_input,
    "setuid file": setuid_file,
    "shadow": open_to_read("/etc/shadow"),
    "root's home": lambda: read_something("/root/.bashrc")(),
    "host port": connect("127.0.0.1", PORT),
    "abstract socket": abstract(ABSTRACT),
}


def main():
    found = {}
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
            found[name] = "worked"
        except OSError as error:
            found[name] = errno.errorcode.get(error.errno, "failed")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
