// A file that appears whole or not at all. It is written under a temporary name in its final folder, forced to the
// disk, then renamed, which is atomic. A run that is stopped (stop.h) leaves nothing; a run that is killed (SIGKILL)
// leaves at most the temporary file. The program has one such file at a time.
#pragma once

#include <cstddef>
#include <string>

namespace eaves::cli {

class AtomicFile {
 public:
  /// Creates the temporary file now, so that an unwritable path is known before any work. Throws InvalidArgument, its
  /// message beginning with `argument` ("--output"). It refuses a path that exists and is read-only or no regular file
  /// (a folder, /dev/null), because renaming would replace it. A symbolic link stays, and its target is written.
  AtomicFile(const std::string& argument, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Both throw std::runtime_error with the system's words, for example if the disk is full.
  void write(const void* data, std::size_t bytes);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;

  std::string path_;
  std::string temporary_path_;
  int descriptor_ = -1;
};

}  // namespace eaves::cli
