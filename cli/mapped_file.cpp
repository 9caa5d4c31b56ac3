// MappedFile of safetensors.h: the part that talks to the system.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cli/safetensors.h"
#include "eaves/error.h"

namespace eaves::cli {

MappedFile::MappedFile(const std::string& argument, const std::string& path) {
  const auto refuse = [&](const std::string& why) -> void {
    throw InvalidArgument(fmt::format("{}: {} {}", argument, path, why));
  };
  // O_NONBLOCK: opening a FIFO would otherwise wait for someone to write to it.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
  struct stat status {};
  const bool is_known = fstat(descriptor, &status) == 0;
  if (is_known && S_ISREG(status.st_mode) && status.st_size > 0) {
    size_ = static_cast<std::size_t>(status.st_size);
    data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  }
  const int error = errno;
  close(descriptor);
  if (is_known && S_ISDIR(status.st_mode)) refuse("is a folder, expected a file");
  if (is_known && !S_ISREG(status.st_mode)) refuse("is not a regular file");
  if (!is_known || data_ == MAP_FAILED) refuse(fmt::format("cannot be mapped: {}", std::strerror(error)));
  device_ = status.st_dev;
  inode_ = status.st_ino;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

bool MappedFile::is_same_file(const std::string& path) const {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && status.st_dev == device_ && status.st_ino == inode_;
}

}  // namespace eaves::cli
