// The Python module lora_refit._C. Addresses are integers; nothing here links torch or CUDA.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/copy.h"
#include "cpu/digest.h"
#include "cpu/merge.h"
#include "cpu/shared_word.h"
#include "cpu/simd.h"
#include "cuda_bindings.h"

namespace py = pybind11;

namespace lora_refit {
namespace {

uint64_t* word_at(uint64_t address) {
  if (address == 0 || address % alignof(uint64_t) != 0) {
    throw std::invalid_argument("address " + std::to_string(address) + " is not a 64-bit word's");
  }
  return reinterpret_cast<uint64_t*>(address);
}

CopyProgram make_program(const py::buffer& blocks, const std::vector<int>& src_dtypes,
                         const std::vector<int64_t>& src_sizes, const std::vector<int>& dst_dtypes,
                         const std::vector<int64_t>& dst_sizes, int64_t tile_bytes) {
  return CopyProgram(unpack<CopyBlock>("blocks", blocks),
                     buffer_shapes("sources", src_dtypes, src_sizes),
                     buffer_shapes("destinations", dst_dtypes, dst_sizes), tile_bytes);
}

void run_program(const CopyProgram& program, const Words& src_addresses, const Words& dst_addresses,
                 Words& digests, int threads) {
  check_length("src_addresses", src_addresses, program.source_count());
  check_length("dst_addresses", dst_addresses, program.destination_count());
  check_length("digests", digests, program.destination_count());
  const uint64_t* src = src_addresses.data();
  const uint64_t* dst = dst_addresses.data();
  uint64_t* out = digests.mutable_data();
  py::gil_scoped_release unlocked;
  program.run(src, dst, out, threads);
}

MergeProgram make_merge_program(const py::buffer& blocks, const py::buffer& segments,
                                const std::vector<int>& src_dtypes,
                                const std::vector<int64_t>& src_sizes,
                                const std::vector<int>& dst_dtypes,
                                const std::vector<int64_t>& dst_sizes, int32_t modules) {
  return MergeProgram(unpack<MergeBlock>("blocks", blocks),
                      unpack<MergeSegment>("segments", segments),
                      buffer_shapes("sources", src_dtypes, src_sizes),
                      buffer_shapes("destinations", dst_dtypes, dst_sizes), modules);
}

void run_merge(const MergeProgram& program, const Words& src_addresses, const Words& dst_addresses,
               Words& digests, const py::buffer& sums, int threads) {
  check_length("src_addresses", src_addresses, program.source_count());
  check_length("dst_addresses", dst_addresses, program.destination_count());
  check_length("digests", digests, program.destination_count());
  const uint64_t* src = src_addresses.data();
  const uint64_t* dst = dst_addresses.data();
  uint64_t* out = digests.mutable_data();
  MergeSums* totals = writable_sums(sums, program.module_count());
  py::gil_scoped_release unlocked;
  program.run(src, dst, out, totals, threads);
}

void digest_arrays(const Words& addresses, const Words& sizes_bytes, Words& out, int threads) {
  const size_t count = static_cast<size_t>(out.size());
  check_length("addresses", addresses, count);
  check_length("sizes_bytes", sizes_bytes, count);
  check_length("out", out, count);
  const uint64_t* address = addresses.data();
  const uint64_t* size = sizes_bytes.data();
  uint64_t* digest = out.mutable_data();
  py::gil_scoped_release unlocked;
  digest_buffers(address, size, count, digest, threads);
}

py::dict block_layout() {
  py::dict layout;
  layout["src"] = offsetof(CopyBlock, src);
  layout["dst"] = offsetof(CopyBlock, dst);
  layout["src_offset"] = offsetof(CopyBlock, src_offset);
  layout["dst_offset"] = offsetof(CopyBlock, dst_offset);
  layout["size"] = offsetof(CopyBlock, size);
  layout["src_stride"] = offsetof(CopyBlock, src_stride);
  layout["dst_stride"] = offsetof(CopyBlock, dst_stride);
  layout["scale"] = offsetof(CopyBlock, scale);
  layout["flags"] = offsetof(CopyBlock, flags);
  layout["sizeof"] = sizeof(CopyBlock);
  return layout;
}

void bind_copy(py::module_& module) {
  py::class_<CopyProgram>(module, "CopyProgram")
      .def(py::init(&make_program), py::arg("blocks"), py::arg("src_dtypes"), py::arg("src_sizes"),
           py::arg("dst_dtypes"), py::arg("dst_sizes"), py::arg("tile_bytes") = kDefaultTileBytes)
      .def("run", &run_program, py::arg("src_addresses").noconvert(),
           py::arg("dst_addresses").noconvert(), py::arg("digests").noconvert(),
           py::arg("threads") = 0)
      .def_property_readonly("block_count", &CopyProgram::block_count)
      .def_property_readonly("tile_count", &CopyProgram::tile_count)
      .def_property_readonly("bytes_read", &CopyProgram::bytes_read)
      .def_property_readonly("bytes_written", &CopyProgram::bytes_written);
  module.def("digest", &digest_arrays, py::arg("addresses").noconvert(),
             py::arg("sizes_bytes").noconvert(), py::arg("out").noconvert(),
             py::arg("threads") = 0);
  module.def("block_layout", &block_layout);
  module.def("cpu_features", [] { return simd_name(choose_simd()); });
}

void bind_merge(py::module_& module) {
  py::class_<MergeProgram>(module, "MergeProgram")
      .def(py::init(&make_merge_program), py::arg("blocks"), py::arg("segments"),
           py::arg("src_dtypes"), py::arg("src_sizes"), py::arg("dst_dtypes"), py::arg("dst_sizes"),
           py::arg("modules"))
      .def("run", &run_merge, py::arg("src_addresses").noconvert(),
           py::arg("dst_addresses").noconvert(), py::arg("digests").noconvert(), py::arg("sums"),
           py::arg("threads") = 0)
      .def_property_readonly("block_count", &MergeProgram::block_count)
      .def_property_readonly("tile_count", &MergeProgram::tile_count)
      .def_property_readonly("bytes_read", &MergeProgram::bytes_read)
      .def_property_readonly("bytes_written", &MergeProgram::bytes_written);
}

void bind_shared_words(py::module_& module) {
  module.def(
      "load_acquire", [](uint64_t address) { return load_acquire(word_at(address)); },
      py::arg("address"));
  module.def(
      "store_release",
      [](uint64_t address, uint64_t value) { store_release(word_at(address), value); },
      py::arg("address"), py::arg("value"));
  module.def("fence_seq_cst", &fence_seq_cst);
  module.def(
      "compare_exchange",
      [](uint64_t address, uint64_t expected, uint64_t desired) {
        return compare_exchange(word_at(address), expected, desired);
      },
      py::arg("address"), py::arg("expected"), py::arg("desired"));
}

}  // namespace
}  // namespace lora_refit

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "Copy and merge programs, digests and shared-memory words. Typed in _C/__init__.pyi.";
  lora_refit::bind_copy(module);
  lora_refit::bind_merge(module);
  lora_refit::bind_shared_words(module);
  lora_refit::bind_cuda(module);
}
