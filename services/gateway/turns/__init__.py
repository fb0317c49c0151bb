"""From turn to turn: earlier answers keep the token ids in which the model said them."""
