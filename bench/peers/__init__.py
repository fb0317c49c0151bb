"""Ours and other servers on the same weights, with the same bounds, on the same machine, in alternation.

``command_line`` says what is asked for, ``systems`` what can be measured; ``vllm``, ``llama`` and ``ours`` bring
servers up, ``processes`` keeps their processes, ``passes`` is what they are asked, ``asking`` asks it, ``rounds`` does
so in turn, ``figures``, ``targets`` and ``results`` make numbers of the answers. The how-to is
docs/how-to/compare-with-peers.md.
"""
