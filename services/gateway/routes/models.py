"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from services.gateway.admission import check_model
from services.gateway.gateway import Gateway
from services.gateway.openai_schema.models import ModelCard, ModelList
from services.gateway.openapi import describes


def models_router(gateway: Gateway) -> APIRouter:
    router = APIRouter(tags=["models"])

    def card() -> ModelCard:
        facts = gateway.facts
        return ModelCard(
            id=facts.name,
            created=facts.created,
            root=facts.name,
            max_model_len=gateway.max_context,
            vocab_size=facts.vocab_size,
        )

    @router.get(
        "/v1/models", response_model=None, openapi_extra=describes(None, ModelList), summary="The model of this cell"
    )
    async def list_models() -> Response:
        return Response(msgspec.json.encode(ModelList(data=[card()])), media_type="application/json")

    @router.get(
        "/v1/models/{model:path}",
        response_model=None,
        openapi_extra=describes(None, ModelCard),
        summary="One model by its name",
    )
    async def get_model(model: str) -> Response:
        check_model(model, gateway.facts.name)
        return Response(msgspec.json.encode(card()), media_type="application/json")

    return router
