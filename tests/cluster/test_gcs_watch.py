"""What happens when the GCS of a cluster does not answer."""

from __future__ import annotations

import socket
import time

import pytest

from chairlift.cluster import gcs_watch
from chairlift.server.access.admission import AdmissionController


def test_the_gcs_of_a_cluster_is_lost_when_it_has_not_answered_for_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of the GCS, which takes less, is none."""
    now = [0.0]
    answers = {5.0: "UNAVAILABLE", 10.0: "UNAVAILABLE", 15.0: "UNAUTHENTICATED"}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(gcs_watch, "gcs_status", lambda _address: answers.get(now[0], "UNAVAILABLE"))
    gcs_watch.wait_for_gcs_loss("head:6379")
    assert now == [45.0]
    monkeypatch.undo()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert gcs_watch.gcs_status(f"127.0.0.1:{unused.getsockname()[1]}") == "UNAVAILABLE"


def test_an_ingress_drains_until_the_gcs_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts 30 s before Ray ends the process, and ends here when the GCS answers for the third time."""
    now, admission = [0.0], AdmissionController()
    drains: dict[float, bool] = {}

    def status(_address: str) -> str:
        drains[now[0]] = admission.is_draining
        if now[0] > 85:
            raise KeyboardInterrupt
        return "UNAUTHENTICATED" if now[0] in (0.0, 80.0) else "UNAVAILABLE"

    monkeypatch.setenv(gcs_watch.GCS_TIMEOUT_VARIABLE, "90")
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(gcs_watch, "gcs_status", status)
    with pytest.raises(KeyboardInterrupt):
        gcs_watch.drain_without_gcs(admission, "head:6379")
    assert [at for at, is_draining in drains.items() if is_draining] == [60.0, 65.0, 70.0, 75.0, 80.0]


def test_a_gcs_that_has_never_answered_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_watch, "gcs_status", lambda _address: "UNAVAILABLE")
    admission = AdmissionController()
    gcs_watch.drain_without_gcs(admission, "head:6379")
    assert not admission.is_draining
