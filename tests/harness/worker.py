"""One worker of a pool: joins its group once, then runs the cases it is sent until its pipe closes."""

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta

GROUP_TIMEOUT = timedelta(seconds=90)
SEED = 1234


def worker_main(conn, rank: int, world_size: int, port: int, log_path: str) -> None:
    """Body of the worker process; ``conn`` carries pickled cases in and ``(index, status, value)`` out."""
    import torch
    import torch.distributed as dist

    _log_to(log_path)
    torch.set_num_threads(1)
    os.environ.update(_environment(rank, world_size, port))
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    conn.send_bytes(pickle.dumps((-1, "ready", None)))
    while True:
        try:
            message = conn.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        where, first, cases, path = pickle.loads(message)
        for index, kwargs in enumerate(cases, start=first):
            _reset(torch)
            try:
                value = _load(where, path)(rank, world_size, **kwargs)
                answer = pickle.dumps((index, "ok", value))
            except BaseException as error:
                answer = pickle.dumps((index, "error", (type(error).__name__, str(error), traceback.format_exc())))
            conn.send_bytes(answer)
            if pickle.loads(answer)[1] == "error":
                break
        gc.collect()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    if sys.platform.startswith("linux"):
        names["GLOO_SOCKET_IFNAME"] = "lo"  # no name look-up, no outside interface
    return {name: str(value) for name, value in names.items()}


def _log_to(path: str) -> None:
    """Send this process's output, also that of native code, to a file; SIGUSR1 writes every stack there."""
    file = open(path, "a", buffering=1, encoding="utf-8", errors="replace")
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file=file)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _reset(torch) -> None:
    """What a case before may have left behind and the next one would notice."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(SEED)
    random.seed(SEED)


def _load(where: tuple[str, str, str], path: list[str]):
    """The test's function, imported by the name that pytest gave its module, else from its file."""
    module_name, file, qualname = where
    sys.path[:] = path
    if module_name not in sys.modules:
        try:
            importlib.import_module(module_name)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module_name, file)
            sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    found = sys.modules[module_name]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
