"""The endpoints, one family per module; each module returns an APIRouter for a composed gateway."""
