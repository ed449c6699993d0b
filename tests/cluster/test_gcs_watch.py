"""What happens when the GCS of a cluster does not answer."""

from __future__ import annotations

import socket
import time

import pytest

from chairlift.cluster import gcs_watch
from chairlift.server.access.admission import AdmissionController


def test_an_ingress_drains_until_the_gcs_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts 30 s before Ray ends the process, and ends here when the GCS answers for the third time. A restart of
    the GCS, which takes less, does not count."""
    now, admission = [0.0], AdmissionController()
    drains: dict[float, bool] = {}

    def is_answering(_address: str) -> bool:
        drains[now[0]] = admission.is_draining
        if now[0] > 95:
            raise KeyboardInterrupt
        return now[0] in (0.0, 10.0, 90.0)

    monkeypatch.setenv(gcs_watch.GCS_TIMEOUT_VARIABLE, "90")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(gcs_watch, "is_gcs_answering", is_answering)
    with pytest.raises(KeyboardInterrupt):
        gcs_watch.drain_without_gcs(admission, "head:6379")
    assert [at for at, is_draining in drains.items() if is_draining] == [70.0, 75.0, 80.0, 85.0, 90.0]


def test_a_gcs_that_has_never_answered_is_not_watched() -> None:
    admission = AdmissionController()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gcs_watch.drain_without_gcs(admission, f"127.0.0.1:{unused.getsockname()[1]}")
    assert not admission.is_draining
