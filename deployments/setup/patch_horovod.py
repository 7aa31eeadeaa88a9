"""Patch Horovod's sources, as `patch_horovod.py FOLDER`: see PATCHES."""

import sys
from pathlib import Path


def _lines(*lines: str) -> str:
    return "\n".join(lines)


CXX_14, CXX_17 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"

PATCHES = (
    # torch >= 2.1 does not compile as C++14 (horovod#3998).
    ("CMakeLists.txt", CXX_14, CXX_17),
    ("horovod/torch/CMakeLists.txt", CXX_14, CXX_17),
    # Reserved only, the vector is empty: the check for stalled ranks reads its size, and finds no rank.
    ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);"),
    # The ranks of a process set, which exchange the gradients, took the address of the host's name as theirs.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());",
        _lines("  assert(global_context.IsEnabled());", "  gloo_iface_ = global_context.gloo_iface_;"),
    ),
    # Horovod's thread asks the other ranks a thousand times per second for the tensors that are ready, even if it has
    # none itself. That took a tenth of the time of a rank with one core. Now it waits for the next tensor.
    (
        "horovod/common/tensor_queue.h",
        "#include <iostream>",
        _lines("#include <chrono>", "#include <condition_variable>", "#include <iostream>"),
    ),
    (
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);",
        _lines(
            "  void FinalizeTensorQueue(const Status& status);",
            "",
            "  void WaitForMessage(std::chrono::milliseconds timeout);",
        ),
    ),
    (
        "horovod/common/tensor_queue.h",
        "  mutable std::mutex mutex_;",
        _lines("  mutable std::mutex mutex_;", "  std::condition_variable has_message_;"),
    ),
    (
        "horovod/common/tensor_queue.cc",
        _lines("  message_queue_.push(std::move(message));", "  return Status::OK();"),
        _lines("  message_queue_.push(std::move(message));", "  has_message_.notify_one();", "  return Status::OK();"),
    ),
    (
        "horovod/common/tensor_queue.cc",
        _lines("    message_queue_.push(std::move(messages[i]));", "  }"),
        _lines("    message_queue_.push(std::move(messages[i]));", "  }", "  has_message_.notify_one();"),
    ),
    (
        "horovod/common/tensor_queue.cc",
        "// Execute callback for each tensor and clear tensor queue",
        _lines(
            "void TensorQueue::WaitForMessage(std::chrono::milliseconds timeout) {",
            "  std::unique_lock<std::mutex> lock(mutex_);",
            "  if (message_queue_.empty()) {",
            "    has_message_.wait_for(lock, timeout);",
            "  }",
            "}",
            "",
            "// Execute callback for each tensor and clear tensor queue",
        ),
    ),
    # A rank that has joined has nothing to send, and takes part in what the others send; so may one of several sets.
    (
        "horovod/common/operations.cc",
        _lines(
            "  state.last_cycle_start = std::chrono::steady_clock::now();",
            "",
            "  if (state.mark_cycles_in_timeline) {",
        ),
        _lines(
            "  auto& global_set = state.process_set_table.Get(0);",
            "  if (state.process_set_table.Ids().size() == 1 && !global_set.joined && !state.shut_down) {",
            "    global_set.tensor_queue.WaitForMessage(std::chrono::milliseconds(20));",
            "  }",
            "  state.last_cycle_start = std::chrono::steady_clock::now();",
            "",
            "  if (state.mark_cycles_in_timeline) {",
        ),
    ),
)
"""File, text to replace, and its replacement. After a change, increment `patch` in build_horovod.sh."""


def patch(folder: Path) -> None:
    """Patch the unpacked sources in a folder.

    Raises:
        SystemExit: A file does not have the text that is replaced.
    """
    for name, old, new in PATCHES:
        file = folder / name
        text = file.read_text() if file.is_file() else ""
        if old not in text:
            raise SystemExit(
                f"patch_horovod: '{name}' does not have '{old}': adapt PATCHES in "
                "deployments/setup/patch_horovod.py to this version of Horovod"
            )
        file.write_text(text.replace(old, new))


if __name__ == "__main__":
    patch(Path(sys.argv[1]))
