"""Answers' token ids across turns: earlier answers keep the ids as the model sampled them."""
