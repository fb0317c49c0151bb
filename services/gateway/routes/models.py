"""GET /v1/models and /v1/models/{id}, in OpenAI's or Anthropic's shape, by the client's headers."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.messages_api.models import ANTHROPIC_VERSION, ModelInfo, ModelInfoList
from services.gateway.openai_schema.models import ModelCard, ModelList
from services.gateway.openapi import describes


def models_router(gateway: Gateway) -> APIRouter:
    """Return the routes of the model list and of single models."""
    router = APIRouter(tags=["models"])

    def card(name: str) -> ModelCard:
        """Return the card of the base model, or of an adapter, whose parent is the base model. Raises NotFound."""
        facts, adapter = gateway.facts, gateway.cell.adapter(gateway.model(name).name)
        return ModelCard(
            id=name,
            created=facts.created,
            root=facts.name if adapter is None else adapter.path,
            parent=None if adapter is None else facts.name,
            max_model_len=gateway.max_context,
            vocab_size=facts.vocab_size,
        )

    @router.get(
        "/v1/models", response_model=None, openapi_extra=describes(None, ModelList), summary="The models of this cell"
    )
    async def list_models(http: Request) -> Response:
        cards = [card(name) for name in gateway.model_names()]
        if ANTHROPIC_VERSION in http.headers:
            return json_response(ModelInfoList.of([_info(each) for each in cards]))
        return json_response(ModelList(data=cards))

    @router.get(
        "/v1/models/{model:path}",
        response_model=None,
        openapi_extra=describes(None, ModelCard),
        summary="One model by its name",
    )
    async def get_model(http: Request, model: str) -> Response:
        found = card(model)
        return json_response(_info(found) if ANTHROPIC_VERSION in http.headers else found)

    return router


def _info(card: ModelCard) -> ModelInfo:
    created = datetime.fromtimestamp(card.created, UTC).isoformat(timespec="seconds")
    return ModelInfo(id=card.id, display_name=card.id, created_at=created, max_input_tokens=card.max_model_len)
