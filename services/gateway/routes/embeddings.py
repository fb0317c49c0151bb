"""POST /v1/embeddings, which is refused with a reason."""

from __future__ import annotations

from fastapi import APIRouter

from services.gateway.gateway import Gateway
from services.gateway.openai_schema.errors import ErrorResponse
from services.gateway.openapi import describes
from shared.errors import InvalidRequest


def embeddings_router(gateway: Gateway) -> APIRouter:
    """Return the route of embeddings, which raises InvalidRequest."""
    router = APIRouter(tags=["embeddings"])

    @router.post(
        "/v1/embeddings",
        response_model=None,
        openapi_extra=describes(None, ErrorResponse),
        summary="Refused: this cell generates text",
    )
    async def create_embeddings() -> None:
        raise InvalidRequest(
            f"embeddings are not served: {gateway.facts.name!r} is trained to continue texts, not to compare two of "
            "them, and workers return only tokens; use a server of an embedding model",
            code="unsupported_endpoint",
        )

    return router
