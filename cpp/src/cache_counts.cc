#include "jaxrec/serving/cache_counts.h"

namespace jaxrec::serving {

// jaxrec/serve/http/metrics.py has these names.
std::string to_metrics(const CacheCounts& counts) {
  std::string text;
  const auto add = [&](const std::string& name, const char* type, const char* help, int64_t value) {
    text += "# HELP " + name + " " + help + "\n# TYPE " + name + " " + type + "\n" + name + " " +
            std::to_string(value) + "\n";
  };
  add("jaxrec_history_cache_hits_total", "counter", "Rows whose history was cached.", counts.hits);
  add("jaxrec_history_cache_appends_total", "counter",
      "Rows whose new events were appended to a cache.", counts.appends);
  add("jaxrec_history_cache_misses_total", "counter", "Rows whose history was encoded.",
      counts.misses);
  add("jaxrec_history_cache_evictions_total", "counter", "Caches that were dropped for others.",
      counts.evictions);
  add("jaxrec_history_caches", "gauge", "Cached histories.", counts.caches);
  add("jaxrec_history_cache_bytes", "gauge", "Bytes of cached histories.", counts.bytes);
  return text;
}

}  // namespace jaxrec::serving
