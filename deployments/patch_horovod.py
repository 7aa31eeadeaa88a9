"""Patch Horovod's sources, as `patch_horovod.py FOLDER`: see PATCHES."""

import sys
from pathlib import Path

CXX_14, CXX_17 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"

PATCHES = (
    # torch >= 2.1 does not compile as C++14 (horovod#3998).
    ("CMakeLists.txt", CXX_14, CXX_17),
    ("horovod/torch/CMakeLists.txt", CXX_14, CXX_17),
    # Reserved only, the vector is empty: the check for stalled ranks reads its size, and finds no rank.
    ("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_);", "global_ranks_.resize(size_);"),
    # Horovod's thread asks the other ranks a thousand times per second for the tensors that are ready, even if it has
    # none itself. That took a tenth of the time of a rank with one core. Now it waits for the next tensor.
    (
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>\n",
    ),
    (
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);\n",
        "  void FinalizeTensorQueue(const Status& status);\n\n"
        "  void WaitForMessage(std::chrono::milliseconds timeout);\n",
    ),
    (
        "horovod/common/tensor_queue.h",
        "  mutable std::mutex mutex_;\n",
        "  mutable std::mutex mutex_;\n  std::condition_variable has_message_;\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  has_message_.notify_one();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  has_message_.notify_one();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "// Execute callback for each tensor and clear tensor queue\n",
        "void TensorQueue::WaitForMessage(std::chrono::milliseconds timeout) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  has_message_.wait_for(lock, timeout, [this] { return !message_queue_.empty(); });\n"
        "}\n\n"
        "// Execute callback for each tensor and clear tensor queue\n",
    ),
    # A rank that has joined has nothing to send, and takes part in what the others send; so may one of several sets.
    (
        "horovod/common/operations.cc",
        "  state.last_cycle_start = std::chrono::steady_clock::now();\n\n  if (state.mark_cycles_in_timeline) {\n",
        "  auto& global_set = state.process_set_table.Get(0);\n"
        "  if (state.process_set_table.Ids().size() == 1 && !global_set.joined && !state.shut_down) {\n"
        "    global_set.tensor_queue.WaitForMessage(std::chrono::milliseconds(20));\n"
        "  }\n"
        "  state.last_cycle_start = std::chrono::steady_clock::now();\n\n  if (state.mark_cycles_in_timeline) {\n",
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
                f"patch_horovod: '{name}' does not have '{old}': adapt PATCHES in deployments/patch_horovod.py to this "
                "version of Horovod"
            )
        file.write_text(text.replace(old, new))


if __name__ == "__main__":
    patch(Path(sys.argv[1]))
