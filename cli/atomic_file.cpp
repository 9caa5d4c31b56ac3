// Plain POSIX calls: the standard library has no fsync, and no way to create a file only if its name is free.
#include "cli/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "cli/stop.h"
#include "eaves/error.h"

namespace eaves::cli {
namespace {

// The target of a path's symbolic links, which need not exist.
std::filesystem::path resolve(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // the limit of Linux
  std::error_code error;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(path, error); ++i) {
    path = path.parent_path() / std::filesystem::read_symlink(path, error);
  }
  return path;
}

}  // namespace

AtomicFile::AtomicFile(const std::string& argument, const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument(fmt::format("{}: {} {}", argument, path, why));
  };
  const auto refuse_for = [&](int error) { refuse(fmt::format("cannot be written: {}", std::strerror(error))); };
  struct stat status {};
  if (stat(path.c_str(), &status) == 0) {
    if (!S_ISREG(status.st_mode)) refuse("exists and is not a regular file, expected a regular file or a new name");
    if (access(path.c_str(), W_OK) != 0) refuse_for(errno);
    if ((status.st_mode & 0222) == 0) refuse_for(EACCES);  // root may write it, but somebody has protected it
  } else if (errno != ENOENT) {
    refuse_for(errno);
  }
  const std::filesystem::path target = resolve(path);
  path_ = target.string();
  if (target.filename().empty())
    throw InvalidArgument(fmt::format("{}: is \"{}\", expected the name of a file", argument, path));
  // Other processes write other names. Runs of the same process id that were killed may have left some of the 100
  // names.
  for (int attempt = 0; attempt < 100 && descriptor_ < 0; ++attempt) {
    const std::string name = fmt::format(".{}.{}.{}.tmp", target.filename().string(), getpid(), attempt);
    temporary_path_ = (target.parent_path() / name).string();
    remove_when_stopped(temporary_path_.c_str());  // before the file exists, so that a signal never misses it
    descriptor_ = open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) {
    remove_when_stopped(nullptr);
    refuse_for(errno);
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
  // The data must reach the disk before the name does, or a power cut could leave an empty file under the name.
  if (fsync(descriptor_) != 0) fail("cannot be flushed to the disk");
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) fail("cannot be renamed from its temporary name");
  remove_when_stopped(nullptr);
  close(descriptor_);
  descriptor_ = -1;
}

}  // namespace eaves::cli
