// MappedFile of safetensors.h: the system calls.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cli/safetensors.h"
#include "cli/stop.h"
#include "eaves/error.h"

namespace eaves::cli {

MappedFile::MappedFile(const std::string& argument, const std::string& path)
    : label_(fmt::format("{}: {}", argument, path)) {
  const auto refuse = [&](const std::string& why) -> void {
    if (descriptor_ >= 0) close(descriptor_);
    throw InvalidArgument(fmt::format("{} {}", label_, why));
  };
  // O_NONBLOCK, because opening a FIFO would otherwise wait for a writer.
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) refuse(fmt::format("cannot be read: {}", std::strerror(errno)));
  const bool is_known = fstat(descriptor_, &status_) == 0;
  if (is_known && S_ISREG(status_.st_mode) && status_.st_size > 0) {
    size_ = static_cast<std::size_t>(status_.st_size);
    data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor_, 0);
  }
  const int error = errno;
  if (is_known && S_ISDIR(status_.st_mode)) refuse("is a folder, expected a safetensors file");
  if (is_known && !S_ISREG(status_.st_mode)) refuse("is not a regular file, expected a safetensors file");
  if (!is_known || data_ == MAP_FAILED) refuse(fmt::format("cannot be mapped into memory: {}", std::strerror(error)));
  expect_input_at(data_, size_);
}

MappedFile::~MappedFile() {
  expect_input_at(nullptr, 0);
  if (data_ != nullptr) munmap(data_, size_);
  close(descriptor_);
}

bool MappedFile::is_same_file(const std::string& path) const {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && status.st_dev == status_.st_dev && status.st_ino == status_.st_ino;
}

void MappedFile::check_unchanged() const {
  struct stat status {};
  const bool is_known = fstat(descriptor_, &status) == 0;
  if (is_known && status.st_size == status_.st_size && status.st_mtim.tv_sec == status_.st_mtim.tv_sec &&
      status.st_mtim.tv_nsec == status_.st_mtim.tv_nsec) {
    return;
  }
  throw InvalidArgument(fmt::format("{} was written by another process while it was read", label_));
}

}  // namespace eaves::cli
