#include "checksums.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "jaxrec/serving/error.h"

namespace jaxrec::serving {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSegmentBytes = int64_t{1} << 26;
constexpr size_t kBufferBytes = size_t{1} << 20;

struct Segment {
  fs::path path;
  int64_t start;
  int64_t size;
  std::string crc32;
};

std::string hex(uint32_t crc) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", crc);
  return text;
}

// Returns what is wrong with a segment, or nothing.
std::string damage(const Segment& segment, std::vector<unsigned char>& buffer) {
  const int file = ::open(segment.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return segment.path.string() + " cannot be read: " + std::strerror(errno);
  uLong crc = ::crc32(0, nullptr, 0);
  int64_t left = segment.size;
  while (left > 0) {
    const size_t most = std::min<size_t>(buffer.size(), static_cast<size_t>(left));
    const ssize_t count =
        ::pread(file, buffer.data(), most, segment.start + segment.size - left);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    crc = ::crc32(crc, buffer.data(), static_cast<uInt>(count));
    left -= count;
  }
  ::close(file);
  if (left > 0 || hex(static_cast<uint32_t>(crc)) != segment.crc32) {
    return segment.path.string() + " does not have the bytes of the export";
  }
  return "";
}

std::vector<Segment> segments_of(const fs::path& path, const std::string& file,
                                 const StoredFile& stored) {
  const int64_t count = stored.bytes / kSegmentBytes + (stored.bytes % kSegmentBytes != 0);
  if (count != static_cast<int64_t>(stored.crc32.size())) {
    throw ArtifactError(file + " has " + std::to_string(stored.crc32.size()) +
                        " checksums in manifest.json");
  }
  std::vector<Segment> segments;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i * kSegmentBytes;
    segments.push_back({path, start, std::min(kSegmentBytes, stored.bytes - start),
                        stored.crc32[static_cast<size_t>(i)]});
  }
  return segments;
}

}  // namespace

std::string crc32_of(std::string_view text) {
  return hex(static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const unsigned char*>(text.data()), text.size())));
}

void check_files(const fs::path& directory, const std::map<std::string, StoredFile>& files,
                 bool with_checksums) {
  std::vector<Segment> segments;
  for (const auto& [file, stored] : files) {
    const fs::path path = directory / file;
    std::error_code error;
    const uintmax_t size = fs::file_size(path, error);
    if (error) throw ArtifactError(path.string() + " cannot be read: " + error.message());
    if (size != static_cast<uintmax_t>(stored.bytes)) {
      throw ArtifactError(path.string() + " has " + std::to_string(size) + " bytes, but " +
                          std::to_string(stored.bytes) + " were exported");
    }
    for (Segment& segment : segments_of(path, file, stored)) segments.push_back(std::move(segment));
  }
  if (!with_checksums) return;
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::string problem;
  const auto read = [&] {
    std::vector<unsigned char> buffer(kBufferBytes);
    for (size_t i = next++; i < segments.size(); i = next++) {
      const std::string found = damage(segments[i], buffer);
      if (found.empty()) continue;
      const std::lock_guard<std::mutex> lock(mutex);
      if (problem.empty()) problem = found;
    }
  };
  const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, 16u);
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(cores, segments.size()); ++i) threads.emplace_back(read);
  read();
  for (std::thread& thread : threads) thread.join();
  if (!problem.empty()) throw ArtifactError(problem);
}

}  // namespace jaxrec::serving
