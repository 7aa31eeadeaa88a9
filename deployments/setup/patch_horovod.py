"""Patch Horovod's sources, as `patch_horovod.py FOLDER`: see PATCHES."""

import sys
from pathlib import Path


def _lines(*lines: str) -> str:
    return "\n".join(lines)


TORCH_HEADERS = _lines("#include <torch/extension.h>", "#include <torch/torch.h>")
NEEDED_HEADERS = _lines("#include <torch/csrc/utils/pybind.h>", "#include <torch/types.h>")
CXX_14, CXX_20 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"

PATCHES = (
    # torch >= 2.13 does not compile as C++14 (horovod#3998), nor as C++17.
    ("CMakeLists.txt", CXX_14, CXX_20),
    ("horovod/torch/CMakeLists.txt", CXX_14, CXX_20),
    # Python 3.12 has no distutils.
    (
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    # GCC 13 no longer includes them through other headers (horovod#3957).
    (
        "horovod/common/common.h",
        "#include <functional>",
        _lines("#include <cstdint>", "#include <functional>", "#include <stdexcept>"),
    ),
    ("horovod/common/group_table.h", "#include <queue>", _lines("#include <queue>", "#include <string>")),
    # GCC 14 refuses the assignment of spans, which writes it.
    ("third_party/flatbuffers/include/flatbuffers/stl_emulation.h", "  const size_type count_;", "  size_type count_;"),
    # Half of the build's time and most of the wheel's size were -O3 and debug information.
    (
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")',
    ),
    # Sources that are compiled together parse the headers that they share once. The groups take about as long.
    (
        "horovod/torch/CMakeLists.txt",
        "add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})",
        _lines(
            "add_library(${PYTORCH_TARGET_LIB} SHARED ${PYTORCH_SOURCES} ${SOURCES})",
            "set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)",
            "foreach(FILE IN LISTS PYTORCH_SOURCES SOURCES)",
            "    file(RELATIVE_PATH NAME ${PROJECT_SOURCE_DIR}/horovod ${FILE})",
            "    if(NAME MATCHES ^torch/)",
            "        set(GROUP torch)",
            "    elseif(NAME MATCHES /gloo|common/operations)",
            "        set(GROUP gloo)",
            "    elseif(NAME MATCHES /optim/|/parameter_manager)",
            "        set(GROUP autotuner)",
            "    elseif(NAME MATCHES gpu|cuda|nccl)",
            "        set(GROUP gpu)",
            "    else()",
            "        set(GROUP common)",
            "    endif()",
            "    set_source_files_properties(${FILE} PROPERTIES UNITY_GROUP ${GROUP})",
            "endforeach()",
        ),
    ),
    (
        "third_party/gloo/gloo/CMakeLists.txt",
        "add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})",
        _lines(
            "add_library(gloo ${GLOO_STATIC_OR_SHARED} ${GLOO_SRCS})",
            "set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)",
            'set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/allreduce_local.cc"',
            "                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)",
        ),
    ),
    # Of all of torch's headers, which take most of the time of the sources that include them, two are used.
    ("horovod/torch/adapter_v2.h", TORCH_HEADERS, NEEDED_HEADERS),
    ("horovod/torch/mpi_ops_v2.cc", TORCH_HEADERS, NEEDED_HEADERS),
    # For the configuration, Python imported torch seven times, which needs all the packages that torch depends on.
    (
        "cmake/Modules/FindPytorch.cmake",
        'execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"',
        _lines(
            "execute_process(COMMAND ${PY_EXE} -c \"import importlib.util as u; print(u.find_spec('torch').origin)\"",
            "                OUTPUT_VARIABLE TORCH OUTPUT_STRIP_TRAILING_WHITESPACE)",
            "get_filename_component(TORCH ${TORCH} DIRECTORY)",
            "set(VERSION \"import runpy; print(runpy.run_path('${TORCH}/version.py')['__version__'])\")",
            'execute_process(COMMAND ${PY_EXE} -c "${VERSION}"',
        ),
    ),
    (
        "cmake/Modules/FindPytorch.cmake",
        _lines("if(NOT PYTORCH_FOUND)", "    return()", "endif()"),
        _lines(
            "set(Pytorch_INCLUDE_DIRS ${TORCH}/include ${TORCH}/include/torch/csrc/api/include)",
            "set(LIB ${TORCH}/lib)",
            "set(Pytorch_LIBRARIES ${LIB}/libc10.so ${LIB}/libtorch_cpu.so ${LIB}/libtorch_python.so)",
            "if(HAVE_CUDA)",
            "    list(APPEND Pytorch_LIBRARIES ${LIB}/libc10_cuda.so ${LIB}/libtorch_cuda.so)",
            "endif()",
            "set(Pytorch_CUDA ${HAVE_CUDA})",
            "set(Pytorch_CXX11 TRUE)",
            "return()",
        ),
    ),
    # The library was to look for torch's libraries in the folder of the build; torch has loaded them before.
    ("CMakeLists.txt", "project(horovod CXX)", _lines("project(horovod CXX)", "set(CMAKE_SKIP_RPATH ON)")),
    # Ninja, which compiles Horovod's sources while Gloo's are not ready, takes it for a target.
    ("setup.py", "make_args.append('VERBOSE=1')", "make_args = ['-v']"),
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
