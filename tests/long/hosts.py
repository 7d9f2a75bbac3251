"""Hosts for launchers: each a network, UTS, mount and PID namespace of its own, on one bridge.
Linux, as root.

    with Hosts(["n1", "n2"], folder) as hosts:
        print(hosts.run("n1", "srun -N2 python train.py", timeout=60))

Whatever runs in a host ends with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HOLD = (
    "hostname {name}; mount --bind {hosts} /etc/hosts; mount -t proc proc /proc; ip link set lo "
    "up; echo up; exec sleep infinity"
)


class Hosts:
    """Hosts by name at 10.77.0.1, 10.77.0.2, ...; each has an /etc/hosts that names them all."""

    def __init__(self, names: list[str], folder: Path, *, own_line: str = "") -> None:
        """`own_line`: what the /etc/hosts of each says first; `{name}` in it is the host's name."""
        self.names = names
        self._folder = folder
        self._own_line = own_line
        self._first: dict[
            str, int
        ] = {}  # the process that keeps a host, as this machine numbers it
        self._undo = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as undo:
            switch = self._hold("switch", undo)
            self.do("switch", "ip link add br0 type bridge && ip link set br0 up")
            for number, name in enumerate(self.names, 1):
                pid = self._hold(name, undo)
                subprocess.run(
                    f"ip link add v{number} netns {switch} type veth peer name eth0 netns {pid}".split(),
                    check=True,
                )
                self.do("switch", f"ip link set v{number} master br0 up")
                self.do(name, f"ip addr add 10.77.0.{number}/24 dev eth0 && ip link set eth0 up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _hold(self, name: str, undo: ExitStack) -> int:
        hosts = self._folder / f"hosts.{name}"
        # what a host says of itself may be in its own line
        others = [known for known in self.names if known != name or not self._own_line]
        known = "".join(f"10.77.0.{self.names.index(each) + 1} {each}\n" for each in others)
        hosts.write_text(f"127.0.0.1 localhost\n{self._own_line.format(name=name)}\n{known}")
        holder = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--uts",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                HOLD.format(name=name, hosts=hosts),
            ],
            stdout=subprocess.PIPE,
        )
        undo.callback(holder.wait)
        undo.callback(holder.kill)
        assert holder.stdout is not None
        undo.callback(holder.stdout.close)
        assert holder.stdout.readline() == b"up\n", f"{name} did not start"
        self._first[name] = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        return self._first[name]

    def start(
        self, name: str, command: str, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> Any:
        """A shell command in a host; stdout and stderr together."""
        enter = [
            "nsenter",
            "--target",
            str(self._first[name]),
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "sh",
            "-c",
        ]
        return subprocess.Popen(
            [*enter, command],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **options,
        )

    def run(
        self,
        name: str,
        command: str,
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        """Its exit code and output."""
        with self.start(name, command, env=env) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
                raise AssertionError(
                    f"{command!r} on {name} still runs after {timeout:g} s; it said:\n{out}"
                ) from None
            return process.returncode, out

    def do(self, name: str, command: str) -> str:
        """Its output; an error unless it ends with 0."""
        code, out = self.run(name, command)
        assert code == 0, f"{command!r} on {name} ended with {code}:\n{out}"
        return out
