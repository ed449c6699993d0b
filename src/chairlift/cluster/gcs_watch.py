"""Detection that the GCS of a Ray cluster, the server of its head node, does not answer."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from chairlift.server.access.admission import AdmissionController

logger = logging.getLogger("chairlift")

GCS_TIMEOUT_VARIABLE: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Seconds after which Ray ends a process without a message because the GCS, its head node's server, does not answer."""
RAY_GCS_TIMEOUT: Final = 60.0
"""Its default in Ray."""

CLUSTER_ID_METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first call of each driver of Ray."""
PROBE_SECONDS: Final = 5.0
GCS_LOSS_SECONDS: Final = 30.0
"""Time that the requests of an ingress have before Ray ends its process."""


def is_gcs_answering(address: str) -> bool:
    """Whether the GCS of a cluster answers a call without a token, also with the error that one is missing."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(CLUSTER_ID_METHOD)(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return True


def drain_without_gcs(admission: AdmissionController, address: str) -> None:
    """Reject the calls of an ingress before Ray ends its process because the GCS does not answer. Does not return.

    Requests in progress have GCS_LOSS_SECONDS to finish. If the GCS answers again, calls are accepted again. A GCS that
    has never answered, for example because Ray uses TLS, is not watched.
    """
    if not is_gcs_answering(address):
        return
    seconds = float(os.environ.get(GCS_TIMEOUT_VARIABLE, RAY_GCS_TIMEOUT)) - GCS_LOSS_SECONDS
    while True:
        answered = time.monotonic()
        while time.monotonic() - answered < seconds:
            time.sleep(PROBE_SECONDS)
            if is_gcs_answering(address):
                answered = time.monotonic()
        logger.error(
            "the GCS of Ray has not answered for %g s, and Ray ends this process in about %g s: the ingress rejects "
            "new requests",
            seconds, GCS_LOSS_SECONDS,
        )  # fmt: skip
        admission.is_draining = True
        while not is_gcs_answering(address):
            time.sleep(PROBE_SECONDS)
        admission.is_draining = False
        logger.warning("the GCS of Ray answers again: the ingress accepts requests")
