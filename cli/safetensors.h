// Files of tensors in the safetensors format: 8 bytes of header length, a JSON header, then the data of the tensors
// without gaps. Files come from anywhere, so a reader believes nothing: whatever parse_safetensors() returns lies
// inside the bytes that it was given, and whatever it refuses it refuses with InvalidArgument and one sentence.
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

/// A tensor as the file describes it. `data` is aligned to nothing: the format promises no alignment.
struct StoredTensor {
  std::string dtype_name;      ///< the format's word: "BF16"
  std::optional<DType> dtype;  ///< nothing where the format has an element type that eaves lacks
  Dims shape;
  std::span<const std::byte> data;
};

using StoredTensors = std::map<std::string, StoredTensor>;

/// `label` begins every message, usually the path. The result points into `file`.
StoredTensors parse_safetensors(std::span<const std::byte> file, const std::string& label);

/// A name from a file, made fit for a message: in quotes, short, without control characters.
std::string in_quotes(std::string_view text);

/// A whole regular file, mapped read-only. Throws InvalidArgument if it cannot be read. The program has one such
/// file at a time: reading bytes that another process has cut off meanwhile ends it (stop.h).
class MappedFile {
 public:
  MappedFile(const std::string& argument, const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

  /// True where `path` is this file, whatever it is called there.
  bool is_same_file(const std::string& path) const;

  /// Throws InvalidArgument if the file has been written since. One that is cut short within its last page only
  /// ends in zeros, and has no bytes whose reading fails.
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

/// Writes the tensors so that each is aligned to its element size in the file. The file still has to be committed.
void write_safetensors(AtomicFile& file, std::vector<NamedTensor> tensors);

}  // namespace eaves::cli
