// A file that appears whole or not at all: written under a temporary name in the folder where it will live, forced to
// the disk, then renamed, which is atomic. A run that is stopped (stop.h) leaves nothing, one that is killed (SIGKILL)
// at most the temporary file. The program has one such file at a time.
#pragma once

#include <cstddef>
#include <string>

namespace eaves::cli {

class AtomicFile {
 public:
  /// Creates the temporary file now, so that a path that cannot be written is known before any work. Throws
  /// InvalidArgument, its message beginning with `argument` ("--output"). A path that exists and is no regular file (a
  /// folder, /dev/null) or is read-only is refused: renaming would replace it. A symbolic link
  /// stays, and its target is written.
  AtomicFile(const std::string& argument, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Throw std::runtime_error with the system's words, a full disk for example.
  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_path_;
  int descriptor_ = -1;
};

}  // namespace eaves::cli
