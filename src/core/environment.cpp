#include "core/environment.h"

#include <cstdlib>
#include <string_view>

namespace eaves {
namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

}  // namespace

bool checks_targets_on_gpu() { return is_set("EAVES_CHECK_TARGETS"); }

bool is_batch_invariant() { return is_set("EAVES_BATCH_INVARIANT"); }

FusedProduct fused_product() {
  const char* value = std::getenv("EAVES_FUSED_PRODUCT");
  if (value == nullptr || std::string_view(value) == "") return FusedProduct::where_tried;
  if (std::string_view(value) == "auto") return FusedProduct::where_faster;
  return std::string_view(value) == "0" ? FusedProduct::never : FusedProduct::wherever_possible;
}

}  // namespace eaves
