"""Compares Chairlift with other engines, which run the same requests on the same machine in turns.

    python -m benchmarks.peers.openvino     OpenVINO GenAI
    python -m benchmarks.peers.llamacpp     llama.cpp's llama-server
    python -m benchmarks.peers.hf           transformers: static and continuous batches
    python -m benchmarks.peers.vllm         vLLM on the CPU

Run from the root of the repository; see docs/peers.md.
"""
