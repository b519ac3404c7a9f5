"""Proof that a peer knows the cluster token, without sending it.

Both ends of every connection challenge each other with a fresh nonce; a proof is an HMAC over
the nonce and the prover's side, so a proof can be neither replayed nor reflected.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32


class AuthenticationError(ConnectionError):
    """The peer does not know the cluster token."""


def mint_nonce() -> bytes:
    """A fresh challenge of 32 random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(cluster_token: str, side: bytes, nonce: bytes) -> bytes:
    """HMAC-SHA256 of ``side`` and ``nonce`` under the token."""
    return hmac.new(cluster_token.encode(), side + b"\0" + nonce, hashlib.sha256).digest()


def check_proof(cluster_token: str, side: bytes, nonce: bytes, received: bytes) -> None:
    """Raise AuthenticationError unless ``received`` is the proof for this side and nonce."""
    if not hmac.compare_digest(proof(cluster_token, side, nonce), received):
        raise AuthenticationError(
            f"peer claiming to be a {side.decode()} gave a wrong proof of the cluster token; "
            "give every process of the cluster the same PAGEFERRY_CLUSTER_TOKEN"
        )
