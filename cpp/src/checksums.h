// CRC-32 as eight hex digits, of texts and of files by segments that several threads read.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "jaxrec/serving/manifest.h"

namespace jaxrec::serving {

std::string crc32_of(std::string_view text);

// Checks that the files of a folder have the sizes, and with `with_checksums` the bytes, that they
// were exported with. Throws ArtifactError, which names the file.
void check_files(const std::filesystem::path& directory,
                 const std::map<std::string, StoredFile>& files, bool with_checksums);

}  // namespace jaxrec::serving
