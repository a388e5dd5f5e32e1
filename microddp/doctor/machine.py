"""Facts about the machine; a fact that cannot be had says why.

The facts are asked in a process of their own, since a driver may hang or crash, and since asking
a GPU for its memory takes some of it until the process ends.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from microddp.comms import cpu_cores, cpu_name
from microddp.hosts import Cluster, Link
from microddp.report import human_bytes

PATIENCE = 60.0  # seconds for all facts; to open each of 8 GPUs takes several
VARIABLES = re.compile("(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES)$|(NCCL|GLOO|MICRODDP|TORCH)_")
ENOUGH_SHARED = 512 << 20  # bytes; a container gets 64 MiB unless told otherwise
SMI_QUERY = (
    "--query-gpu=index,name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,"
    "power.draw,power.limit,temperature.gpu,utilization.gpu,compute_mode"
)


def facts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each fact; a text may have several lines."""
    command = [sys.executable, "-m", "microddp.doctor.machine"]
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        told, noise = asking.communicate(timeout=PATIENCE)
        end = f"the process that asked ended with status {asking.returncode}"
    except subprocess.TimeoutExpired as late:
        told, noise = late.stdout or b"", late.stderr or b""
        end = f"no answer {PATIENCE:g} s after the first question"
    finally:
        asking.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver may keep it for ever
            asking.wait(1.0)
        for pipe in filter(None, (asking.stdout, asking.stderr)):
            pipe.close()
    unanswered = list(PROBES)
    for line in told.decode().splitlines():
        if line.startswith('["'):
            name, text = json.loads(line)
            unanswered.remove(name)
            yield name, text
    if unanswered:
        yield unanswered[0], f"{end}; not asked: {', '.join(unanswered[1:]) or 'nothing more'}"
    if noise.strip():
        yield "complaints", noise.decode(errors="replace").strip()


def main() -> None:
    """Ask everything, and print a line of JSON for each fact as soon as it is known."""
    for name, probe in PROBES.items():
        try:
            text = probe()
        except Exception as error:  # whatever it is, the next fact may still be had
            text = f"not known, {type(error).__name__}: {error}"
        print(json.dumps([name, text]), flush=True)


def _answer(*command: str) -> str:
    """Return what a program prints, as plain text; it has 10 seconds."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        told = " ".join((done.stderr or done.stdout).split())
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {told}")
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).strip("\n")  # topo -m underlines its header


def _microddp() -> str:
    folder = str(Path(__file__).parents[1])
    text = f"{metadata.version('microddp')}, in {folder}"
    try:  # not the commit of a project that it is only installed in
        _answer("git", "-C", folder, "ls-files", "--error-unmatch", __file__)
        return f"{text}, commit {_answer('git', '-C', folder, 'describe', '--always', '--dirty')}"
    except (OSError, RuntimeError, subprocess.SubprocessError):  # not a clone, or no git
        return text


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.platform()}, {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"


def _cores() -> str:
    text = f"{cpu_name()}, {cpu_cores()} of {os.cpu_count()} cores for this process"
    quota, _, period = _control_group("cpu.max").partition(" ")
    return (
        text if quota == "max" else f"{text}, limited to the time of {int(quota) / int(period):g}"
    )


def _memory() -> str:
    text = human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if (path := Path("/proc/meminfo")).exists():
        kib = dict(re.findall(r"(\w+): +(\d+) kB", path.read_text()))
        text += f", {human_bytes(int(kib['MemAvailable']) * 1024)} available"
    limit = _control_group("memory.max")
    return text if limit == "max" else f"{text}, limited to {human_bytes(int(limit))}"


def _control_group(name: str) -> str:
    """Return a limit of the container, whose control group is its root; ``"max"``: none."""
    path = Path("/sys/fs/cgroup", name)
    return path.read_text().strip() if path.exists() else "max"


def _shared_memory() -> str:
    if not Path("/dev/shm").exists():
        return "no /dev/shm, which is Linux's"
    size = shutil.disk_usage("/dev/shm")
    warning = "; warning: small, in a container pass --shm-size=1g or --ipc=host"
    text = f"{human_bytes(size.total)}, {human_bytes(size.free)} free"
    return text if size.total >= ENOUGH_SHARED else text + warning


def _limits() -> str:
    kinds = {"open files": resource.RLIMIT_NOFILE, "locked bytes": resource.RLIMIT_MEMLOCK}
    limits = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return ", ".join(
        f"{name} {'no limit' if n == resource.RLIM_INFINITY else n}" for name, n in limits.items()
    )


def _temporary_folder() -> str:
    folder = tempfile.gettempdir()
    return f"{folder}, {human_bytes(shutil.disk_usage(folder).free)} free"


def _torch() -> str:
    kinds = {"CUDA": torch.version.cuda, "HIP": torch.version.hip}
    built = [f"{name} {version}" for name, version in kinds.items() if version]
    return f"{torch.__version__}, built for {', '.join(built) or 'CPU'}"


def _backends() -> str:
    gloo = "gloo" if dist.is_gloo_available() else "no gloo"
    if not dist.is_nccl_available():
        return f"{gloo}, no NCCL in this torch"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"{gloo}, NCCL {'.'.join(map(str, version))}"


def _network() -> str:
    """Say which address the host's name has: gloo binds to it, unless told of an interface."""
    host = socket.gethostname()
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
        text = f"host name {host} is {', '.join(found)}; interfaces {interfaces}"
    except OSError as error:
        found, text = [], f"host name {host} has no address ({error}); interfaces {interfaces}"
    local = all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)
    warning = "; warning: several machines could not meet there, set GLOO_SOCKET_IFNAME"
    return text + warning if local and "GLOO_SOCKET_IFNAME" not in os.environ else text


def _hosts_in_a_box() -> str:
    try:
        Cluster([Link.parse("1gbit")]).close()
    except RuntimeError as error:
        return str(error)
    return "allowed"


def _environment() -> str:
    shown = {name: text for name, text in sorted(os.environ.items()) if VARIABLES.match(name)}
    if "MICRODDP_SECRET" in shown:
        shown["MICRODDP_SECRET"] = "is set"  # a report is to be shown to others
    return (
        "\n".join(f"{name}={text}" for name, text in shown.items()) or "nothing that matters here"
    )


def _gpus() -> str:
    lines = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        text = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"
        try:
            free, total = torch.cuda.mem_get_info(index)
            text += f", {human_bytes(total)}, {human_bytes(free)} of it free"
        except RuntimeError as error:  # the next GPU may be well
            text += f", cannot be used: {error}"
        lines.append(f"GPU {index}: {text}")
    return "\n".join(lines) or "none that this torch can use"


def _peers() -> str:
    gpus = range(torch.cuda.device_count())
    reach = torch.cuda.can_device_access_peer
    lines = [f"GPU {a} reaches {[b for b in gpus if a != b and reach(a, b)]}" for a in gpus]
    return "\n".join(lines) or "no GPU"


PROBES: dict[str, Callable[[], str]] = {
    "microddp": _microddp,
    "Python": lambda: f"{sys.version.split()[0]}, {sys.executable}",
    "torch": _torch,
    "backends": _backends,
    "system": _system,
    "cores": _cores,
    "memory": _memory,
    "shared memory": _shared_memory,
    "limits": _limits,
    "temporary files": _temporary_folder,
    "network": _network,
    "environment": _environment,
    # Last, since these may never answer: a keeper of hosts has no time-out, nor a sick driver.
    "hosts in a box": _hosts_in_a_box,
    "nvidia-smi": lambda: _answer("nvidia-smi", SMI_QUERY, "--format=csv"),
    "links": lambda: _answer("nvidia-smi", "topo", "-m"),
    "GPUs": _gpus,
    "peer access": _peers,
}

if __name__ == "__main__":
    main()
