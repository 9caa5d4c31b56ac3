// Files of tensors in the safetensors format: 8 bytes of header length, a JSON header, then the tensors' data without
// gaps. Files come from anywhere, and the reader trusts nothing: every tensor that parse_safetensors() returns lies
// inside the given bytes, and every refusal is an InvalidArgument of one sentence.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/atomic_file.h"
#include "eaves/tensor.h"

namespace eaves::cli {

/// A tensor as the file describes it. `data` may have any address: the format promises no alignment.
struct StoredTensor {
  std::string dtype_name;      ///< the format's word: "BF16"
  std::optional<DType> dtype;  ///< nothing if eaves lacks this element type of the format
  Dims shape;
  std::span<const std::byte> data;
};

using StoredTensors = std::map<std::string, StoredTensor>;

/// `label`, usually the path, begins every message. The result points into `file`.
StoredTensors parse_safetensors(std::span<const std::byte> file, const std::string& label);

/// A name from a file, made safe for a message: in quotes, short, without control characters.
std::string in_quotes(std::string_view text);

/// A regular file, mapped whole and read-only. Throws InvalidArgument if it cannot be read. The program has one such
/// file at a time. If another process cuts the file short, reading the missing bytes ends the program (stop.h).
class MappedFile {
 public:
  MappedFile(const std::string& argument, const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

  /// True if `path` leads to this file, by whatever name.
  bool is_same_file(const std::string& path) const;

  /// Throws InvalidArgument if the file was written since it was mapped. A file that is cut short within its last page
  /// reads as zeros there, and no read of it fails.
  void check_unchanged() const;

 private:
  std::string label_;
  int descriptor_ = -1;
  struct stat status_ {};
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// A tensor to be written, contiguous, in CPU memory.
struct NamedTensor {
  std::string name;
  TensorView view;
};

/// Writes the tensors, each aligned to its element size in the file. The caller commits the file.
void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors);

}  // namespace eaves::cli
