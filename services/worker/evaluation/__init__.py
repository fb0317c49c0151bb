"""Evaluation of answers when only a part of a shared prefix is attended to: scoring of questions over kept tokens."""
