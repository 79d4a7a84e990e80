"""A run while it is open: its directory, its log, and its driver in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rollout_engine.clusters import Cluster, make_cluster
from rollout_engine.config import LogLevel, RunConfig, log_level
from rollout_engine.driver import Driver
from rollout_engine.errors import RunError
from rollout_engine.hostplan import HostPlan
from rollout_engine.loglines import About, Redactor
from rollout_engine.logs import open_logs
from rollout_engine.loopthread import LoopThread
from rollout_engine.monitor import Monitor
from rollout_engine.runstore import open_store
from rollout_engine.store import RunStatus
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import mirror_of
from rollout_engine.store.statusfile import write_status
from rollout_engine.threads import in_own_thread


class OpenRun:
    """Whoever opens it closes it. Once it is open there are `store`, `driver`, and the `thread` of its driver."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        keys: Mapping[str, str],
        *,
        temporary: bool,
        on_cancel: Callable[[str], None],
    ) -> None:
        """`temporary`: nobody looks at its directory from outside. `on_cancel`: told, in the committer's thread, who
        has asked for the run to end; its planned rollouts are then being cancelled."""
        self._config, self._run_dir, self._keys = config, run_dir, keys
        self._temporary, self._on_cancel = temporary, on_cancel
        self._log_level: LogLevel = "off" if temporary else log_level(config)
        self.metrics_url: str | None = None
        """Where the run's metrics are served, if `metrics.port` asks for it."""

    async def open(self, *, resume: bool, retry_failed: bool) -> None:
        """Raises InputError, RunError; then nothing of it is left."""
        # To import Ray takes as long as to read a large run: beside it.
        making = asyncio.ensure_future(asyncio.to_thread(make_cluster, self._config))
        try:
            self.store = await asyncio.to_thread(
                open_store, self._run_dir, self._config, resume=resume, retry_failed=retry_failed
            )
        except BaseException:
            await asyncio.gather(making, return_exceptions=True)  # half-imported, it would be in the way of our end
            raise
        try:
            await self._start(await making)
        except BaseException:
            await asyncio.to_thread(self.store.abandon)
            raise

    async def _start(self, cluster: Cluster) -> None:
        epoch, secrets = self.store.epoch, self._keys.values()
        with contextlib.ExitStack() as undo:
            about = About(self.store.run_id, epoch)
            self._logs = open_logs(
                Layout(self._run_dir).logs, f"driver-e{epoch}", about, self._log_level, self._config.logs, secrets
            )
            undo.callback(self._logs.close)
            monitor = self._make_monitor(cluster, Redactor(secrets), undo)
            self.thread = LoopThread("rollout-driver")
            self.driver = Driver(self._config, self.store, cluster, self._keys, self._make_plan, epoch, monitor)
            self.store.outside.on_cancel = self._cancel_asked
            try:
                await self.thread.call(self.driver.open())
            except BaseException:
                await self.thread.stop()
                raise
            undo.pop_all()

    def _make_monitor(self, cluster: Cluster, redact: Redactor, undo: contextlib.ExitStack) -> Monitor:
        """Shows the run to other terminals and to who collects metrics. Raises InputError where a port is taken."""
        exporters = [cluster.exporter()]
        if self._config.metrics.port is not None:
            from rollout_engine.prometheus import Endpoint

            endpoint = Endpoint(self._config.metrics.address, self._config.metrics.port)
            undo.callback(endpoint.close)
            self.metrics_url = endpoint.url
            exporters.append(endpoint)

        def write(data: bytes) -> None:
            write_status(self._run_dir, redact.encoded(data.decode()).encode())

        return Monitor(
            self.store.run_id,
            self.store.epoch,
            self._config.models,
            None if self._temporary else write,
            [exporter for exporter in exporters if exporter is not None],
        )

    def _make_plan(self, host_id: str, node_id: str) -> HostPlan:
        return HostPlan(
            run_id=self.store.run_id,
            epoch=self.store.epoch,
            host_id=f"{host_id}-e{self.store.epoch}",
            node_id=node_id,
            config=self._config,
            # A run on an object store has no directory that a host could write to: turns travel with their rows.
            run_dir=str(self._run_dir.resolve()) if mirror_of(self._run_dir) is None else None,
            log_level=self._log_level,
        )

    def _cancel_asked(self, who: str) -> None:
        """In the committer's thread."""
        self._on_cancel(who)
        self.thread.soon(self.driver.cancel_all)

    async def close(self, finished: bool) -> None:
        """Stops the hosts, commits what has arrived, and writes the final tables. Raises RunError."""
        status: RunStatus = "failed" if self.driver.fatal is not None else "finished" if finished else "interrupted"
        try:
            await asyncio.shield(self.thread.call(self.driver.close()))
        finally:
            await self.thread.stop()
            try:
                await self._end(status)
            finally:
                await in_own_thread(self._close_logs, "close logs")

    def _close_logs(self) -> None:
        self._logs.close()
        self.store.publish_logs()

    async def _end(self, status: RunStatus) -> None:
        """Final tables and the end of the epoch. Raises RunError where the disk does not let it."""
        if self.driver.disk_hangs:
            limit_s = self._config.store.commit_s
            raise RunError(f"the disk did not take all rows within {limit_s:g} s (store.commit_s); resume the run")
        limit_s = self._config.store.final_tables_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await in_own_thread(partial(self.store.close, status), "close run")
        except TimeoutError:
            if not limit.expired():
                raise
            raise RunError(
                f"the final tables were not written within {limit_s:g} s (store.final_tables_s); all rows are in the "
                "log, and `rollout resume` makes the tables"
            ) from None
