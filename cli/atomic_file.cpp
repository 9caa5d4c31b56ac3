// Plain POSIX calls: the standard library has no fsync and cannot create a file only where there is none.
#include "cli/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>

#include "cli/stop.h"
#include "eaves/error.h"

namespace eaves::cli {
namespace {

// The file that a path stands for: what a symbolic link points to, where that exists.
std::string resolve(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> resolved(realpath(path.c_str(), nullptr), &std::free);
  return resolved ? std::string(resolved.get()) : path;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& argument, const std::string& path) : path_(resolve(path)) {
  struct stat status {};
  if (stat(path_.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw InvalidArgument(fmt::format("{}: {} exists and is not a regular file", argument, path));
  }
  const std::filesystem::path target(path_);
  if (target.filename().empty()) {
    throw InvalidArgument(fmt::format("{}: \"{}\" names no file", argument, path));
  }
  // Other processes write other names; 100 tries are for names that killed runs of the same process id left behind.
  for (int attempt = 0; attempt < 100 && descriptor_ < 0; ++attempt) {
    const std::string name = fmt::format(".{}.{}.{}.tmp", target.filename().string(), getpid(), attempt);
    temporary_path_ = (target.parent_path() / name).string();
    remove_when_stopped(temporary_path_.c_str());  // before it is there, so that a signal never finds it unknown
    descriptor_ = open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    remove_when_stopped(nullptr);
    throw InvalidArgument(fmt::format("{}: {} cannot be written: {}", argument, path, std::strerror(errno)));
  }
}

AtomicFile::~AtomicFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_path_.c_str());
  remove_when_stopped(nullptr);
}

void AtomicFile::fail(const char* what) const {
  throw std::runtime_error(fmt::format("{}: {}: {}", path_, what, std::strerror(errno)));
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("cannot be written");
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  // The data must be on the disk before the name is: otherwise a power cut could leave an empty file under it.
  if (fsync(descriptor_) != 0) fail("cannot be forced to the disk");
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
  remove_when_stopped(nullptr);
  close(descriptor_);
  descriptor_ = -1;
}

}  // namespace eaves::cli
